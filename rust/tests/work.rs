// SPDX-License-Identifier: GPL-2.0

//! Work items: when they run, and that none runs after it was taken down.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_work)]
mod tests {
    use crate::{
        fake::{
            Op,
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        new_mutex,
        prelude::*,
        sync::{
            Arc,
            Mutex, //
        }, //
    };
    use rdma::{
        context::{
            Execution,
            MayWait,
            Softirq, //
        },
        device::Device,
        latch::Latch,
        pool::PooledCq,
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    /// Counts its runs in `a`, those that ended in `b`, and stops in `c`.
    #[pin_data]
    struct Job<'bound> {
        env: Arc<Env>,
        dev: &'bound Device<'bound>,
        /// Whether a run waits for the gate.
        waits: bool,
        #[pin]
        gate: Latch,
        /// Something to be dropped by the run, such as the work item itself.
        #[pin]
        held: Mutex<Option<KBox<dyn Keep + 'bound>>>,
    }

    impl<'bound> Job<'bound> {
        fn new(t: &Test<'bound>, waits: bool) -> impl PinInit<Self, Error> + use<'bound> {
            let (env, dev) = (t.env.clone(), t.dev);
            try_pin_init!(Self {
                env,
                dev,
                waits,
                gate <- Latch::new(),
                held <- new_mutex!(None, "rdma_kunit::Job::held"),
            })
        }
    }

    impl<'bound> Task<'bound> for Job<'bound> {
        fn run(&self, may_wait: MayWait<'_>) {
            self.env.log.a.add();
            if Execution::current() != Execution::Worker {
                self.env.log.misplaced.add();
            }
            check!(PooledCq::<Softirq>::lease(self.dev, 1, None, may_wait.may_sleep()).is_ok());
            if self.waits {
                check!(self.gate.wait(10_000, may_wait));
            }
            let held = self.held.lock().take();
            drop(held);
            self.env.log.b.add();
        }

        fn stop(&self) {
            self.env.log.c.add();
            self.gate.open();
        }
    }

    fn work<'bound>(t: &Test<'bound>, waits: bool) -> Result<ScopedWork<'bound, Job<'bound>>> {
        ScopedWork::new(t.dev, Job::new(t, waits), t.may_sleep())
    }

    #[test]
    fn it_runs_when_queued_and_not_before() -> Result {
        with_device(Setup::new(), |t| {
            let work = work(t, false)?;
            a_while();
            check_eq!(t.log().a.get(), 0);
            check!(work.enqueue());
            check!(eventually(|| t.log().b.get() == 1));
            Ok(())
        })
    }

    #[test]
    fn it_runs_each_time_it_is_queued() -> Result {
        with_device(Setup::new(), |t| {
            let work = work(t, false)?;
            for i in 1..=30 {
                check!(work.enqueue());
                check!(eventually(|| t.log().b.get() == i));
            }
            check_eq!(t.log().a.get(), 30);
            Ok(())
        })
    }

    #[test]
    fn it_is_queued_once_and_says_so() -> Result {
        with_device(Setup::new(), |t| {
            let work = work(t, true)?;
            check!(work.enqueue());
            check!(eventually(|| t.log().a.get() == 1));
            // It runs: it can be queued once more, but not twice.
            check!(work.enqueue());
            check!(!work.enqueue());
            check_eq!(t.log().a.get(), 1);
            work.task().gate.open();
            check!(eventually(|| t.log().b.get() == 2));
            a_while();
            check_eq!(t.log().a.get(), 2);
            Ok(())
        })
    }

    #[test]
    fn it_can_be_queued_from_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            let work = work(t, false)?;
            for (i, place) in Place::ALL.into_iter().enumerate() {
                let queued = place.run(|| work.enqueue());
                check_eq!((place, queued), (place, Some(true)));
                check!(eventually(|| t.log().b.get() == i as u32 + 1));
            }
            Ok(())
        })
    }

    #[test]
    fn a_drop_stops_it_once_wherever_it_happens() -> Result {
        with_device(Setup::new(), |t| {
            for (i, place) in Place::ALL.into_iter().enumerate() {
                let i = i as u32;
                let work = work(t, true)?;
                check!(work.enqueue());
                check!(eventually(|| t.log().a.get() == i + 1));
                check_eq!(t.log().b.get(), i);
                place.run(move || drop(work));
                check!(eventually(|| t.log().b.get() == i + 1));
                check_eq!((place, t.log().c.get()), (place, i + 1));
            }
            Ok(())
        })
    }

    #[test]
    fn it_is_stopped_though_it_never_ran() -> Result {
        with_device(Setup::new(), |t| {
            drop(work(t, false)?);
            check!(eventually(|| t.log().c.get() == 1));
            check_eq!(t.log().a.get(), 0);
            Ok(())
        })
    }

    #[test]
    fn remove_waits_for_a_run_to_end() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                for i in 1..=4 {
                    let work = work(t, true)?;
                    check!(work.enqueue());
                    check!(eventually(|| t.log().a.get() == i));
                    t.keep(work)?;
                }
                check_eq!(t.log().b.get(), 0);
                Ok(())
            },
            |env| {
                check_eq!(env.log.a.get(), 4);
                check_eq!(env.log.b.get(), 4);
                check_eq!(env.log.c.get(), 4);
                Ok(())
            },
        )
    }

    #[test]
    fn it_does_not_run_after_remove() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                for _ in 0..30 {
                    let work = work(t, false)?;
                    check!(work.enqueue());
                    t.keep(work)?;
                }
                Ok(())
            },
            |env| {
                let before = env.log.a.get();
                check_eq!(env.log.b.get(), before);
                a_while();
                check_eq!(env.log.a.get(), before);
                check_eq!(env.log.c.get(), 30);
                Ok(())
            },
        )
    }

    #[test]
    fn it_may_drop_itself() -> Result {
        with_device(Setup::new(), |t| {
            let work = Arc::new(work(t, false)?, GFP_KERNEL)?;
            *work.task().held.lock() = Some({
                let held: KBox<dyn Keep + '_> = KBox::new(work.clone(), GFP_KERNEL)?;
                held
            });
            check!(work.enqueue());
            drop(work);
            check!(eventually(|| t.log().c.get() == 1));
            check_eq!(t.log().b.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn it_may_drop_another() -> Result {
        with_device(Setup::new(), |t| {
            let (first, second) = (work(t, false)?, work(t, true)?);
            check!(second.enqueue());
            check!(eventually(|| t.log().a.get() == 1));
            *first.task().held.lock() = Some({
                let held: KBox<dyn Keep + '_> = KBox::new(second, GFP_KERNEL)?;
                held
            });
            check!(first.enqueue());
            check!(eventually(|| t.log().b.get() == 2));
            check_eq!(t.log().c.get(), 1);
            Ok(())
        })
    }

    /// Tries to be queued again by `stop`.
    struct Stubborn<'bound> {
        env: Arc<Env>,
        again: kernel::sync::SetOnce<Arc<ScopedWork<'bound, Stubborn<'bound>>>>,
    }

    impl<'bound> Task<'bound> for Stubborn<'bound> {
        fn run(&self, _: MayWait<'_>) {
            self.env.log.a.add();
        }

        fn stop(&self) {
            self.env.log.c.add();
            if let Some(work) = self.again.as_ref() {
                work.enqueue();
            }
        }
    }

    #[test]
    fn what_is_queued_while_it_is_taken_down_does_not_run_later() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let task = Stubborn {
                    env: t.env.clone(),
                    again: kernel::sync::SetOnce::new(),
                };
                let work = Arc::new(
                    ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?,
                    GFP_KERNEL,
                )?;
                // A cycle: only remove gets to it.
                check!(work.task().again.populate(work.clone()));
                crate::fake::known_leak(work.task());
                Ok(())
            },
            |env| {
                let before = env.log.a.get();
                check!(before <= 1);
                check_eq!(env.log.c.get(), 1);
                a_while();
                check_eq!(env.log.a.get(), before);
                Ok(())
            },
        )
    }

    #[test]
    fn the_task_s_error_is_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            let task = Err::<Job<'_>, Error>(EXDEV);
            let work = ScopedWork::<'_, Job<'_>>::new::<Error>(t.dev, task, t.may_sleep());
            check_err!(work, EXDEV);
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_making_one_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let error = place.run_here(|| work(t, false).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            Ok(())
        })
    }

    #[test]
    fn a_run_may_take_a_queue_pair_down_and_wait() -> Result {
        /// Closes what it is given.
        #[pin_data]
        struct Closer<'bound> {
            #[pin]
            qp: Mutex<Option<KBox<rdma::qp::QueuePair<'bound, Probe<'bound, Softirq>>>>>,
            env: Arc<Env>,
        }

        impl<'bound> Task<'bound> for Closer<'bound> {
            fn run(&self, may_wait: MayWait<'_>) {
                let qp = self.qp.lock().take();
                if let Some(qp) = qp {
                    check_eq!(KBox::into_inner(qp).close(may_wait), Ok(()));
                    check_eq!(self.env.fake.calls(Op::DestroyQp), 1);
                    self.env.log.a.add();
                }
            }

            fn stop(&self) {}
        }

        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, post_again)?;
            for tag in 0..4 {
                qp.post_send(t.request(tag, 8)?)?;
            }
            let (qp, env) = (KBox::new(qp, GFP_KERNEL)?, t.env.clone());
            let closer = try_pin_init!(Closer {
                qp <- new_mutex!(Some(qp), "rdma_kunit::Closer::qp"),
                env,
            });
            let work = ScopedWork::new(t.dev, closer, t.may_sleep())?;
            check!(work.enqueue());
            check!(eventually(|| t.log().a.get() == 1));
            check_eq!(t.log().flushed.get(), 4);
            Ok(())
        })
    }
}
