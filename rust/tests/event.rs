// SPDX-License-Identifier: GPL-2.0

//! Events: who hears what, and until when.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_event)]
mod tests {
    use crate::{
        fake::{
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        new_mutex,
        prelude::*,
        str::CString,
        sync::{
            Arc,
            Mutex, //
        }, //
    };
    use rdma::{
        context::{
            MaySleep,
            Softirq, //
        },
        device::Device,
        event::{
            Event,
            EventHandler,
            EventKind,
            Listener, //
        },
        pool::PooledCq, //
    };

    /// C constants: `IB_EVENT_PORT_ACTIVE` and so on.
    const PORT_ACTIVE: u32 = 9;
    const SM_CHANGE: u32 = 13;
    const GID_CHANGE: u32 = 18;

    /// Every kind of event, by its number.
    const KINDS: [EventKind; 21] = [
        EventKind::CqError,
        EventKind::QpFatal,
        EventKind::QpRequestError,
        EventKind::QpAccessError,
        EventKind::CommunicationEstablished,
        EventKind::SqDrained,
        EventKind::PathMigrated,
        EventKind::PathMigrationError,
        EventKind::DeviceFatal,
        EventKind::PortActive,
        EventKind::PortError,
        EventKind::LidChange,
        EventKind::PkeyChange,
        EventKind::SmChange,
        EventKind::SrqError,
        EventKind::SrqLimitReached,
        EventKind::LastWqeReached,
        EventKind::ClientReregister,
        EventKind::GidChange,
        EventKind::WqFatal,
        EventKind::DeviceSpeedChange,
    ];

    #[test]
    fn every_number_is_a_kind_and_stays_what_it_is() -> Result {
        for raw in Iterator::chain(0..=255, [1000, u32::MAX]) {
            let known = usize::try_from(raw).ok().and_then(|i| KINDS.get(i));
            let kind = EventKind::from(raw);
            check_eq!(kind, known.map_or(EventKind::Unknown(raw), |kind| *kind));
            check_eq!(kind.raw(), raw);
            let words = CString::try_from_fmt(fmt!("{kind}"))?;
            // For one of them the kernel has no words.
            let wordless = known.is_none() || kind == EventKind::WqFatal;
            check_eq!(
                (raw, words.to_bytes() == b"unrecognized event"),
                (raw, wordless)
            );
        }
        outcome()
    }

    /// Counts in `a` what it hears, and keeps the last in `b` (its kind; 100 more if it has a port that
    /// there is, or is about the device) and `c` (port).
    #[pin_data(PinnedDrop)]
    struct Ear<'bound> {
        env: Arc<Env>,
        dev: &'bound Device<'bound>,
        /// Something to be dropped by the first event, such as the registration itself.
        #[pin]
        held: Mutex<Option<KBox<dyn Keep + 'bound>>>,
    }

    impl<'bound> Ear<'bound> {
        fn new(t: &Test<'bound>) -> impl PinInit<Self, Error> + use<'bound> {
            let (env, dev) = (t.env.clone(), t.dev);
            env.log.handlers_made.add();
            try_pin_init!(Self {
                env,
                dev,
                held <- new_mutex!(None, "rdma_kunit::Ear::held"),
            })
        }
    }

    #[pinned_drop]
    impl PinnedDrop for Ear<'_> {
        fn drop(self: Pin<&mut Self>) {
            self.env.log.handlers_dropped.add();
        }
    }

    impl<'bound> Listener<'bound> for Ear<'bound> {
        fn event(&self, event: Event<'bound>, may_sleep: MaySleep<'_>) {
            let log = &self.env.log;
            let (what, port) = match event {
                Event::DeviceFatal | Event::DeviceSpeedChange => (100, None),
                Event::PortActive(port)
                | Event::PortError(port)
                | Event::LidChange(port)
                | Event::PkeyChange(port)
                | Event::SmChange(port)
                | Event::ClientReregister(port)
                | Event::GidChange(port) => {
                    check!(core::ptr::eq(port.device(), self.dev));
                    (100, Some(port))
                }
                Event::Other(_) => (0, None),
            };
            check_eq!(event.port(), port);
            log.b.set(what + event.kind().raw());
            log.c.set(port.map_or(0, |port| port.number()));
            let text = match port {
                Some(port) => {
                    CString::try_from_fmt(fmt!("{} (port {})", event.kind(), port.number()))
                }
                None => CString::try_from_fmt(fmt!("{}", event.kind())),
            };
            let shown = CString::try_from_fmt(fmt!("{event}"));
            check!(text.is_ok() && shown.is_ok());
            if let (Ok(text), Ok(shown)) = (text, shown) {
                check_eq!(shown.to_bytes(), text.to_bytes());
            }
            // It may sleep, and make things.
            check!(PooledCq::<Softirq>::lease(self.dev, 1, None, may_sleep).is_ok());
            let held = self.held.lock().take();
            drop(held);
            log.a.add();
        }
    }

    fn ear<'bound>(t: &Test<'bound>) -> Result<EventHandler<'bound, Ear<'bound>>> {
        EventHandler::new(t.dev, Ear::new(t), t.may_wait)
    }

    fn hears(t: &Test<'_>, event: u32, port: u32) -> (u32, u32, u32) {
        let before = t.log().a.get();
        t.fake().event(event, port);
        eventually(|| t.log().a.get() > before);
        (t.log().a.get() - before, t.log().b.get(), t.log().c.get())
    }

    #[test]
    fn each_kind_is_told_with_its_port() -> Result {
        with_device(Setup::new().ports(2), |t| {
            let _ear = ear(t)?;
            for kind in KINDS {
                let raw = kind.raw();
                let (expected, ports) = match kind {
                    EventKind::PortActive
                    | EventKind::PortError
                    | EventKind::LidChange
                    | EventKind::PkeyChange
                    | EventKind::SmChange
                    | EventKind::ClientReregister => (100 + raw, [1, 2]),
                    EventKind::DeviceFatal | EventKind::DeviceSpeedChange => (100 + raw, [0, 0]),
                    // The core tells of each address that changed, not of the driver's event.
                    EventKind::GidChange => continue,
                    // Where a port would be there is a pointer, of which nothing is made.
                    _ => (raw, [0, 0]),
                };
                for port in [1, 2] {
                    let heard = hears(t, raw, port);
                    let told = if port == 1 { ports[0] } else { ports[1] };
                    check_eq!((kind, heard), (kind, (1, expected, told)));
                }
            }
            Ok(())
        })
    }

    #[test]
    fn an_address_that_changes_is_told_with_its_port() -> Result {
        with_device(Setup::new().ports(2), |t| {
            let _ear = ear(t)?;
            for port in [1, 2] {
                t.fake().event_straight(GID_CHANGE, port);
                check_eq!(t.log().a.get(), port);
                check_eq!(t.log().b.get(), 100 + GID_CHANGE);
                check_eq!(t.log().c.get(), port);
            }
            Ok(())
        })
    }

    #[test]
    fn a_port_that_is_not_there_is_none() -> Result {
        with_device(Setup::new().ports(2), |t| {
            let _ear = ear(t)?;
            for port in [0, 3, 255, u32::MAX] {
                check_eq!(hears(t, SM_CHANGE, port), (1, SM_CHANGE, 0));
                let before = t.log().a.get();
                t.fake().event_straight(PORT_ACTIVE, port);
                check_eq!(t.log().a.get(), before + 1);
                check_eq!((t.log().b.get(), t.log().c.get()), (PORT_ACTIVE, 0));
            }
            Ok(())
        })
    }

    #[test]
    fn a_kind_that_nobody_knows_is_other() -> Result {
        with_device(Setup::new(), |t| {
            let _ear = ear(t)?;
            for kind in [21, 100, 1_000_000] {
                check_eq!(hears(t, kind, 1), (1, kind, 0));
            }
            Ok(())
        })
    }

    #[test]
    fn all_listeners_hear_it() -> Result {
        with_device(Setup::new(), |t| {
            let _ears = (ear(t)?, ear(t)?, ear(t)?);
            t.fake().event(PORT_ACTIVE, 1);
            check!(eventually(|| t.log().a.get() == 3));
            a_while();
            check_eq!(t.log().a.get(), 3);
            Ok(())
        })
    }

    #[test]
    fn nothing_is_heard_before_and_after() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            let ear = ear(t)?;
            t.keep(ear)
        })?;
        {
            let device = stage.env.fake.plug()?;
            device.event(PORT_ACTIVE, 1);
            check_eq!(stage.env.log.a.get(), 0);
            let client = crate::fake::join()?;
            device.event(PORT_ACTIVE, 1);
            check_eq!(stage.env.log.a.get(), 1);
            drop(client);
            device.event(PORT_ACTIVE, 1);
            check_eq!(stage.env.log.a.get(), 1);
            stage.check_clean();
        }
        stage.end()
    }

    #[test]
    fn a_drop_ends_it_wherever_it_happens() -> Result {
        with_device(Setup::new(), |t| {
            let _witness = ear(t)?;
            for (i, place) in Place::ALL.into_iter().enumerate() {
                let ear = ear(t)?;
                place.run(move || drop(ear));
                check!(eventually(|| t.log().handlers_dropped.get() == i as u32 + 1));
                // Only the witness hears this.
                check_eq!(
                    (place, hears(t, PORT_ACTIVE, 1)),
                    (place, (1, 100 + PORT_ACTIVE, 1))
                );
            }
            Ok(())
        })
    }

    #[test]
    fn a_listener_may_drop_its_own_registration() -> Result {
        with_device(Setup::new(), |t| {
            let slot = Arc::pin_init(
                new_mutex!(None::<KBox<EventHandler<'_, SelfDropper<'_>>>>, "slot"),
                GFP_KERNEL,
            )?;
            let dropper = SelfDropper {
                env: t.env.clone(),
                slot: slot.clone(),
            };
            let handler = EventHandler::new::<Error>(t.dev, Ok::<_, Error>(dropper), t.may_wait)?;
            *slot.lock() = Some(KBox::new(handler, GFP_KERNEL)?);
            t.fake().event(PORT_ACTIVE, 1);
            check!(eventually(|| t.log().a.get() == 1));
            check!(slot.lock().is_none());
            a_while();
            t.fake().event(PORT_ACTIVE, 1);
            a_while();
            check_eq!(t.log().a.get(), 1);
            Ok(())
        })
    }

    /// Drops its own registration when it hears something.
    struct SelfDropper<'bound> {
        env: Arc<Env>,
        slot: Arc<Mutex<Option<KBox<EventHandler<'bound, SelfDropper<'bound>>>>>>,
    }

    impl<'bound> Listener<'bound> for SelfDropper<'bound> {
        fn event(&self, _: Event<'_>, _: MaySleep<'_>) {
            let handler = self.slot.lock().take();
            drop(handler);
            self.env.log.a.add();
        }
    }

    #[test]
    fn a_listener_may_drop_a_busy_queue_pair() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, post_again)?;
            for tag in 0..4 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            let made = t.log().handlers_made.get();
            check_eq!(made, 1);
            let ear = ScopedEar::new(t, qp)?;
            check_eq!(hears(t, PORT_ACTIVE, 1), (1, 100 + PORT_ACTIVE, 1));
            check!(eventually(|| t.log().flushed.get() == 4));
            drop(ear);
            Ok(())
        })
    }

    /// An ear that holds something from the start.
    struct ScopedEar<'bound>(
        #[expect(dead_code, reason = "held for its drop")] EventHandler<'bound, Ear<'bound>>,
    );

    impl<'bound> ScopedEar<'bound> {
        fn new(t: &Test<'bound>, object: impl Send + 'bound) -> Result<Self> {
            let (env, dev) = (t.env.clone(), t.dev);
            env.log.handlers_made.add();
            let object: KBox<dyn Keep + 'bound> = KBox::new(object, GFP_KERNEL)?;
            let ear = try_pin_init!(Ear {
                env,
                dev,
                held <- new_mutex!(Some(object), "rdma_kunit::Ear::held"),
            });
            Ok(Self(EventHandler::new(t.dev, ear, t.may_wait)?))
        }
    }

    #[test]
    fn the_listener_s_error_is_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            let listener = Err::<Ear<'_>, Error>(EXDEV);
            let handler = EventHandler::<'_, Ear<'_>>::new::<Error>(t.dev, listener, t.may_wait);
            check_err!(handler, EXDEV);
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_making_one_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let listener = Ear::new(t);
                let error = place.run_here(|| {
                    EventHandler::<'_, Ear<'_>>::new(t.dev, listener, t.may_wait).err()
                });
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
                // It was never made.
                t.log().handlers_dropped.add();
            }
            Ok(())
        })
    }

    #[test]
    fn events_that_race_the_client_s_end_are_harmless() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            let ear = ear(t)?;
            t.keep(ear)
        })?;
        {
            let device = stage.env.fake.plug()?;
            for _ in 0..10 {
                let client = crate::fake::join()?;
                for _ in 0..20 {
                    stage.env.fake.event(PORT_ACTIVE, 1);
                }
                drop(client);
                let heard = stage.env.log.a.get();
                device.event(PORT_ACTIVE, 1);
                check_eq!(stage.env.log.a.get(), heard);
            }
            stage.check_clean();
        }
        stage.end()
    }
}
