// SPDX-License-Identifier: GPL-2.0

//! Leaks: handles that are forgotten, or that keep each other alive, are taken down by `remove`.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_leak)]
mod tests {
    use crate::{
        fake::{
            known_leak,
            Count,
            Op,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        prelude::*,
        sync::{
            atomic::{
                Atomic,
                Relaxed, //
            },
            Arc, //
        }, //
    };
    use rdma::{
        context::{
            MaySleep,
            MayWait,
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        device::Device,
        event::{
            Event,
            EventHandler,
            Listener, //
        },
        pd::ProtectionDomain,
        pool::PooledCq,
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    #[test]
    fn a_protection_domain() -> Result {
        with_device(Setup::new(), |t| t.leak(t.pd()?))
    }

    fn a_lease<C: Poolable>(t: &mut Test<'_>) -> Result {
        t.leak(t.lease::<C>(7, None)?)
    }

    #[test]
    fn a_softirq_lease() -> Result {
        with_device(Setup::new(), a_lease::<Softirq>)
    }

    #[test]
    fn a_workqueue_lease() -> Result {
        with_device(Setup::new(), a_lease::<Workqueue>)
    }

    #[test]
    fn an_unbound_lease() -> Result {
        with_device(Setup::new(), a_lease::<UnboundWorkqueue>)
    }

    #[test]
    fn an_idle_queue_pair() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                t.log().handlers_leaked.add();
                t.leak(t.connected::<Softirq>(4, 4, drop_it)?)
            },
            |env| {
                check_eq!(env.fake.calls(Op::DestroyQp), 1);
                Ok(())
            },
        )
    }

    fn a_busy_queue_pair<C: Poolable>(t: &mut Test<'_>) -> Result {
        let qp = t.connected::<C>(4, 4, post_again)?;
        for tag in 0..4 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag, 8)?)?;
        }
        t.log().handlers_leaked.add();
        t.leak(qp)
    }

    fn its_requests_came_back(env: &Env) -> Result {
        check_eq!(env.log.flushed.get(), 8);
        check_eq!(env.log.tags_dropped.get(), 8);
        check_eq!(env.fake.calls(Op::DestroyQp), 1);
        Ok(())
    }

    #[test]
    fn a_busy_softirq_queue_pair() -> Result {
        with_device_then(
            Setup::new(),
            a_busy_queue_pair::<Softirq>,
            its_requests_came_back,
        )
    }

    #[test]
    fn a_busy_workqueue_queue_pair() -> Result {
        with_device_then(
            Setup::new(),
            a_busy_queue_pair::<Workqueue>,
            its_requests_came_back,
        )
    }

    #[test]
    fn a_busy_unbound_queue_pair() -> Result {
        with_device_then(
            Setup::new(),
            a_busy_queue_pair::<UnboundWorkqueue>,
            its_requests_came_back,
        )
    }

    fn a_cycle<C: Poolable>(t: &mut Test<'_>) -> Result {
        let qp = Arc::new(t.connected::<C>(4, 4, post_again)?, GFP_KERNEL)?;
        for tag in 0..4 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag, 8)?)?;
        }
        qp.handler().hold(qp.clone())?;
        t.log().handlers_leaked.add();
        known_leak(qp.handler());
        Ok(())
    }

    #[test]
    fn a_queue_pair_held_by_its_softirq_handler() -> Result {
        with_device_then(Setup::new(), a_cycle::<Softirq>, its_requests_came_back)
    }

    #[test]
    fn a_queue_pair_held_by_its_workqueue_handler() -> Result {
        with_device_then(Setup::new(), a_cycle::<Workqueue>, its_requests_came_back)
    }

    #[test]
    fn a_queue_pair_held_by_its_unbound_handler() -> Result {
        with_device_then(
            Setup::new(),
            a_cycle::<UnboundWorkqueue>,
            its_requests_came_back,
        )
    }

    #[test]
    fn a_cycle_that_its_handler_breaks_while_it_is_taken_down() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = Arc::new(
                    t.connected::<Softirq>(4, 4, |call, request| {
                        drop(request);
                        // The last handle: too late for a proper end, early enough to be freed.
                        drop(call.probe.release());
                    })?,
                    GFP_KERNEL,
                )?;
                for tag in 0..4 {
                    qp.post_send(t.request(tag, 8)?)?;
                }
                qp.handler().hold(qp.clone())
            },
            |env| {
                check_eq!(env.log.flushed.get(), 4);
                check_eq!(env.fake.calls(Op::DestroyQp), 1);
                check_eq!(env.log.handlers_dropped.get(), 1);
                Ok(())
            },
        )
    }

    #[test]
    fn two_queue_pairs_held_by_each_other_s_handlers() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let a = Arc::new(t.connected::<Softirq>(4, 4, post_again)?, GFP_KERNEL)?;
                let b = Arc::new(t.connected::<Workqueue>(4, 4, post_again)?, GFP_KERNEL)?;
                for tag in 0..4 {
                    a.post_send(t.request(tag, 8)?)?;
                    b.post_recv(t.request(tag, 8)?)?;
                }
                a.handler().hold(b.clone())?;
                b.handler().hold(a.clone())?;
                known_leak(a.handler());
                t.log().handlers_leaked.set(2);
                Ok(())
            },
            |env| {
                check_eq!(env.log.flushed.get(), 8);
                check_eq!(env.fake.calls(Op::DestroyQp), 2);
                Ok(())
            },
        )
    }

    #[test]
    fn what_a_leaked_handler_holds_is_taken_down_too() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, drop_it)?;
            qp.handler()
                .hold((t.lease::<Workqueue>(5, None)?, t.pd()?))?;
            t.log().handlers_leaked.add();
            t.leak(qp)
        })
    }

    #[test]
    fn a_request_and_a_buffer() -> Result {
        with_device(Setup::new(), |t| {
            t.log().tags_leaked.add();
            t.leak(t.request(0, 8)?)?;
            t.leak(rdma::buffer::DmaBuffer::new(t.dev, 8, t.may_sleep())?)
        })
    }

    #[test]
    fn dozens_of_them() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                for i in 0..24 {
                    let qp = t.connected::<Workqueue>(1, 1, post_again)?;
                    qp.post_send(t.request(i, 8)?)?;
                    t.log().handlers_leaked.add();
                    t.leak(qp)?;
                    t.leak(t.lease::<Softirq>(1, None)?)?;
                    t.leak(t.pd()?)?;
                }
                Ok(())
            },
            |env| {
                check_eq!(env.fake.calls(Op::DestroyQp), 24);
                check_eq!(env.log.flushed.get(), 24);
                Ok(())
            },
        )
    }

    /// Counts in `a` what it hears.
    struct Ear(Arc<Env>);

    impl<'bound> Listener<'bound> for Ear {
        fn event(&self, _: Event<'_>, _: MaySleep<'_>) {
            self.0.log.a.add();
        }
    }

    #[test]
    fn an_event_handler_hears_nothing_more() -> Result {
        /// C constant: `IB_EVENT_PORT_ACTIVE`.
        const PORT_ACTIVE: u32 = 9;

        let stage = Stage::new(Setup::new(), |t| {
            let ear = Ear(t.env.clone());
            t.leak(EventHandler::new::<Error>(
                t.dev,
                Ok::<_, Error>(ear),
                t.may_wait,
            )?)
        })?;
        {
            let device = stage.env.fake.plug()?;
            let client = crate::fake::join()?;
            check_eq!(stage.result(), Ok(()));
            device.event(PORT_ACTIVE, 1);
            check_eq!(stage.env.log.a.get(), 1);
            drop(client);
            device.event(PORT_ACTIVE, 1);
            check_eq!(stage.env.log.a.get(), 1);
            stage.check_clean();
        }
        stage.end()
    }

    /// Runs until it is stopped.
    struct Endless {
        env: Arc<Env>,
        stop: Atomic<bool>,
    }

    impl<'bound> Task<'bound> for Endless {
        fn run(&self, _: MayWait<'_>) {
            self.env.log.a.add();
            while !self.stop.load(Relaxed) {
                a_while();
            }
            self.env.log.b.add();
        }

        fn stop(&self) {
            self.env.log.c.add();
            self.stop.store(true, Relaxed);
        }
    }

    #[test]
    fn a_work_item_that_runs_is_stopped() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let task = Endless {
                    env: t.env.clone(),
                    stop: Atomic::new(false),
                };
                let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
                work.enqueue();
                check!(eventually(|| t.log().a.get() == 1));
                t.leak(work)
            },
            |env| {
                check_eq!(env.log.b.get(), 1);
                check_eq!(env.log.c.get(), 1);
                Ok(())
            },
        )
    }

    /// Queues itself for ever.
    struct Restless<'bound> {
        env: Arc<Env>,
        again: kernel::sync::SetOnce<Arc<ScopedWork<'bound, Restless<'bound>>>>,
    }

    impl<'bound> Task<'bound> for Restless<'bound> {
        fn run(&self, _: MayWait<'_>) {
            self.env.log.a.add();
            if let Some(work) = self.again.as_ref() {
                work.enqueue();
            }
        }

        fn stop(&self) {
            self.env.log.c.add();
        }
    }

    #[test]
    fn a_work_item_that_queues_itself_for_ever_ends() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let task = Restless {
                    env: t.env.clone(),
                    again: kernel::sync::SetOnce::new(),
                };
                let work = Arc::new(
                    ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?,
                    GFP_KERNEL,
                )?;
                check!(work.task().again.populate(work.clone()));
                known_leak(work.task());
                work.enqueue();
                check!(eventually(|| t.log().a.get() > 20));
                Ok(())
            },
            |env| {
                let before = env.log.a.get();
                a_while();
                check_eq!(env.log.a.get(), before);
                check_eq!(env.log.c.get(), 1);
                Ok(())
            },
        )
    }

    /// Makes one thing after another, and doesn't end when it is told to, but when it is refused one.
    struct Maker<'bound> {
        env: Arc<Env>,
        dev: &'bound Device<'bound>,
        stop: Atomic<bool>,
    }

    impl<'bound> Maker<'bound> {
        fn make(&self, may_wait: MayWait<'_>) -> Result {
            let may_sleep = may_wait.may_sleep();
            ProtectionDomain::new(self.dev, may_sleep)?;
            PooledCq::<Softirq>::lease(self.dev, 1, None, may_sleep)?;
            EventHandler::new::<Error>(self.dev, Ok::<_, Error>(Ear(self.env.clone())), may_wait)?;
            Ok(())
        }
    }

    impl<'bound> Task<'bound> for Maker<'bound> {
        fn run(&self, may_wait: MayWait<'_>) {
            // As often as it takes to see that nothing refuses.
            let mut rest = 50;
            while rest > 0 {
                if let Err(e) = self.make(may_wait) {
                    self.env.log.b.set(e.to_errno().unsigned_abs());
                    return;
                }
                self.env.log.a.add();
                if self.stop.load(Relaxed) {
                    rest -= 1;
                }
                a_while();
            }
        }

        fn stop(&self) {
            self.stop.store(true, Relaxed);
        }
    }

    #[test]
    fn a_work_item_that_goes_on_can_make_nothing_more() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let task = Maker {
                    env: t.env.clone(),
                    dev: t.dev,
                    stop: Atomic::new(false),
                };
                let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
                work.enqueue();
                check!(eventually(|| t.log().a.get() > 1));
                t.leak(work)
            },
            |env| {
                check_eq!(env.log.b.get(), ENODEV.to_errno().unsigned_abs());
                Ok(())
            },
        )
    }

    #[test]
    fn one_of_every_kind_at_once() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let ear = Ear(t.env.clone());
                t.leak(EventHandler::new::<Error>(
                    t.dev,
                    Ok::<_, Error>(ear),
                    t.may_wait,
                )?)?;
                let task = Endless {
                    env: t.env.clone(),
                    stop: Atomic::new(false),
                };
                let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
                work.enqueue();
                t.leak(work)?;
                a_busy_queue_pair::<Softirq>(t)?;
                a_cycle::<Workqueue>(t)?;
                t.leak(t.lease::<UnboundWorkqueue>(7, None)?)?;
                t.leak(t.pd()?)
            },
            |env| {
                check_eq!(env.log.flushed.get(), 16);
                check_eq!(env.fake.count(Count::LiveQp), 0);
                Ok(())
            },
        )
    }
}
