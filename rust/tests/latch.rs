// SPDX-License-Identifier: GPL-2.0

//! Latches.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_latch)]
mod tests {
    use crate::{
        fake::{
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        prelude::*,
        sync::Arc,
        time::{
            Instant,
            Monotonic, //
        }, //
    };
    use rdma::{
        context::{
            MayWait,
            Softirq, //
        },
        latch::Latch,
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    fn latch() -> Result<Arc<Latch>> {
        Arc::pin_init(Latch::new(), GFP_KERNEL)
    }

    #[test]
    fn it_is_closed_at_first() -> Result {
        with_device(Setup::new(), |t| {
            let latch = latch()?;
            check!(!latch.wait(0, t.may_wait));
            check!(!latch.wait(1, t.may_wait));
            Ok(())
        })
    }

    #[test]
    fn a_wait_takes_as_long_as_it_may() -> Result {
        with_device(Setup::new(), |t| {
            let start = Instant::<Monotonic>::now();
            check!(!latch()?.wait(100, t.may_wait));
            // Less by a tick of the clock, which was running when the wait began.
            check!(start.elapsed().as_millis() >= 80);
            Ok(())
        })
    }

    #[test]
    fn it_stays_open_once_it_is() -> Result {
        with_device(Setup::new(), |t| {
            let latch = latch()?;
            latch.open();
            for _ in 0..3 {
                check!(latch.wait(1, t.may_wait));
                latch.open();
            }
            check!(latch.wait(u32::MAX, t.may_wait));
            Ok(())
        })
    }

    #[test]
    fn it_may_be_opened_from_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ALL {
                let latch = latch()?;
                place.run(|| latch.open());
                check!(latch.wait(1, t.may_wait));
            }
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_nobody_waits() -> Result {
        with_device(Setup::new(), |t| {
            let latch = latch()?;
            latch.open();
            for place in Place::ATOMIC {
                let open = place.run_here(|| latch.wait(1000, t.may_wait));
                check_eq!((place, open), (place, Some(false)));
            }
            Ok(())
        })
    }

    /// Waits at a latch, and counts in `a` before and in `b` afterwards.
    struct Waiter(Arc<Env>, Arc<Latch>);

    impl<'bound> Task<'bound> for Waiter {
        fn run(&self, may_wait: MayWait<'_>) {
            self.0.log.a.add();
            check!(self.1.wait(10_000, may_wait));
            self.0.log.b.add();
        }

        fn stop(&self) {}
    }

    #[test]
    fn all_who_wait_go_on() -> Result {
        with_device(Setup::new(), |t| {
            let latch = latch()?;
            for _ in 0..4 {
                let task = Waiter(t.env.clone(), latch.clone());
                let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
                check!(work.enqueue());
                t.keep(work)?;
            }
            check!(eventually(|| t.log().a.get() == 4));
            a_while();
            check_eq!(t.log().b.get(), 0);
            latch.open();
            check!(eventually(|| t.log().b.get() == 4));
            Ok(())
        })
    }

    #[test]
    fn a_handler_may_open_it() -> Result {
        with_device(Setup::new(), |t| {
            let latch = latch()?;
            let qp = t.connected::<Softirq>(1, 1, |call, _| drop(call.probe.release()))?;
            qp.handler().hold(Opener(latch.clone()))?;
            qp.post_recv(t.request(0, 8)?)?;
            check!(!latch.wait(5, t.may_wait));
            t.fake().complete_recv(qp.num(), crate::fake::Wc::ok(8))?;
            check!(latch.wait(5_000, t.may_wait));
            Ok(())
        })
    }

    /// Opens a latch when it goes.
    struct Opener(Arc<Latch>);

    impl Drop for Opener {
        fn drop(&mut self) {
            self.0.open();
        }
    }
}
