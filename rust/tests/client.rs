// SPDX-License-Identifier: GPL-2.0

//! Clients: when `add` and `remove` are called, and what an `add` that fails leaves behind.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_client)]
mod tests {
    use crate::{
        fake::{
            join,
            Count,
            Fake,
            Op,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        prelude::*,
        sync::Arc, //
    };
    use rdma::{
        context::{
            MaySleep,
            MayWait,
            Softirq, //
        },
        event::{
            Event,
            EventHandler,
            Listener, //
        },
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    /// Counts in `b` when it goes.
    struct Gone(Arc<Env>);

    impl Drop for Gone {
        fn drop(&mut self) {
            self.0.log.b.add();
        }
    }

    fn come_and_go(t: &mut Test<'_>) -> Result {
        t.log().a.add();
        t.keep(Gone(t.env.clone()))
    }

    #[test]
    fn add_is_called_for_a_device_that_was_there() -> Result {
        let stage = Stage::new(Setup::new(), come_and_go)?;
        {
            let _device = stage.env.fake.plug()?;
            check_eq!(stage.env.log.a.get(), 0);
            let client = join()?;
            check_eq!(stage.env.log.a.get(), 1);
            check_eq!(stage.env.log.b.get(), 0);
            drop(client);
            check_eq!(stage.env.log.b.get(), 1);
        }
        stage.end()
    }

    #[test]
    fn add_is_called_for_a_device_that_comes() -> Result {
        let stage = Stage::new(Setup::new(), come_and_go)?;
        let client = join()?;
        check_eq!(stage.env.log.a.get(), 0);
        let device = stage.env.fake.plug()?;
        check_eq!(stage.env.log.a.get(), 1);
        drop(device);
        check_eq!(stage.env.log.b.get(), 1);
        drop(client);
        check_eq!(stage.env.log.b.get(), 1);
        stage.end()
    }

    #[test]
    fn a_device_may_come_and_go_again() -> Result {
        let stage = Stage::new(Setup::new(), come_and_go)?;
        let client = join()?;
        for i in 1..=5 {
            let device = stage.env.fake.plug()?;
            check_eq!(stage.env.log.a.get(), i);
            drop(device);
            check_eq!(stage.env.log.b.get(), i);
        }
        drop(client);
        stage.end()
    }

    #[test]
    fn a_client_may_come_and_go_again_on_the_same_device() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            t.log().a.add();
            let qp = t.connected::<Softirq>(2, 2, post_again)?;
            qp.post_recv(t.request(0, 8)?)?;
            t.keep(qp)?;
            t.keep(Gone(t.env.clone()))
        })?;
        {
            let _device = stage.env.fake.plug()?;
            for i in 1..=5 {
                let client = join()?;
                check_eq!(stage.result(), Ok(()));
                check_eq!(stage.env.log.a.get(), i);
                drop(client);
                check_eq!(stage.env.log.b.get(), i);
                stage.check_clean();
            }
        }
        stage.end()
    }

    #[test]
    fn two_devices_are_two_windows() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            t.log().a.add();
            t.keep(Gone(t.env.clone()))
        })?;
        let second = Fake::new(Setup::new().vectors(8))?;
        {
            let first_device = stage.env.fake.plug()?;
            let client = join()?;
            let second_device = second.plug()?;
            check_eq!(stage.env.log.a.get(), 2);
            drop(first_device);
            check_eq!(stage.env.log.b.get(), 1);
            drop(client);
            check_eq!(stage.env.log.b.get(), 2);
            drop(second_device);
        }
        stage.end()
    }

    #[test]
    fn a_client_registers_once_only() -> Result {
        let stage = Stage::new(Setup::new(), come_and_go)?;
        {
            let _device = stage.env.fake.plug()?;
            let client = join()?;
            check_eq!(join().err(), Some(EBUSY));
            check_eq!(join().err(), Some(EBUSY));
            check_eq!(stage.env.log.a.get(), 1);
            drop(client);
            // Its place is free again.
            drop(join()?);
            check_eq!(stage.env.log.a.get(), 2);
            check_eq!(stage.env.log.b.get(), 2);
        }
        stage.end()
    }

    #[test]
    fn a_client_without_devices_is_fine() -> Result {
        let stage = Stage::new(Setup::new(), come_and_go)?;
        drop(join()?);
        check_eq!(stage.env.log.a.get(), 0);
        stage.end()
    }

    /// A task and a listener that do nothing.
    struct Idle;

    impl<'bound> Task<'bound> for Idle {
        fn run(&self, _: MayWait<'_>) {}
        fn stop(&self) {}
    }

    impl<'bound> Listener<'bound> for Idle {
        fn event(&self, _: Event<'_>, _: MaySleep<'_>) {}
    }

    /// Makes one thing after the other, and gives up before the one that `c` says.
    fn give_up(t: &mut Test<'_>) -> Result {
        let steps = t.log().c.get();
        let step = |i| if steps == i { Err(ENOSPC) } else { Ok(()) };
        step(0)?;
        let pd = t.pd()?;
        step(1)?;
        let lease = t.lease::<Softirq>(5, None)?;
        step(2)?;
        let request = t.request(0, 8)?;
        step(3)?;
        let qp = t.qp_on(&pd, lease, 2, 2, post_again)?;
        step(4)?;
        t.connect(&qp)?;
        step(5)?;
        qp.post_recv(request)?;
        step(6)?;
        qp.post_send(t.request(1, 8)?)?;
        step(7)?;
        t.keep(qp)?;
        step(8)?;
        let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(Idle), t.may_sleep())?;
        step(9)?;
        work.enqueue();
        step(10)?;
        let _events = EventHandler::new::<Error>(t.dev, Ok::<_, Error>(Idle), t.may_wait)?;
        step(11)?;
        t.keep(work)?;
        step(12)
    }

    const STEPS: u32 = 13;

    #[test]
    fn an_add_that_fails_at_any_step_leaves_nothing() -> Result {
        let stage = Stage::new(Setup::new(), give_up)?;
        {
            let _device = stage.env.fake.plug()?;
            for steps in 0..STEPS {
                stage.env.log.c.set(steps);
                let client = join()?;
                check_eq!(stage.result(), Err(ENOSPC));
                // At once, not only when the client goes.
                stage.check_clean();
                drop(client);
                stage.check_clean();
            }
            stage.env.log.c.set(STEPS);
            let client = join()?;
            check_eq!(stage.result(), Ok(()));
            drop(client);
            stage.check_clean();
        }
        stage.end()
    }

    #[test]
    fn an_add_that_fails_in_the_driver_leaves_nothing() -> Result {
        let stage = Stage::new(Setup::new(), give_up)?;
        stage.env.log.c.set(STEPS);
        {
            let _device = stage.env.fake.plug()?;
            for op in [
                Op::AllocPd,
                Op::CreateCq,
                Op::CreateQp,
                Op::ModifyInit,
                Op::QueryPort,
                Op::ModifyRtr,
                Op::ModifyRts,
                Op::PostRecv,
                Op::PostSend,
            ] {
                stage.env.fake.fail(op, ENOSPC);
                let client = join()?;
                check_eq!((op, stage.result()), (op, Err(ENOSPC)));
                stage.check_clean();
                drop(client);
                stage.check_clean();
            }
        }
        stage.end()
    }

    #[test]
    fn a_failed_add_leaves_the_other_devices_alone() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            // Of the two devices, only the second has vectors.
            let lease = t.lease::<Softirq>(1, None)?;
            t.log().a.add();
            t.keep(lease)?;
            t.keep(Gone(t.env.clone()))
        })?;
        let second = Fake::new(Setup::new().vectors(0))?;
        {
            let bad = second.plug()?;
            let good = stage.env.fake.plug()?;
            let client = join()?;
            check_eq!(stage.env.log.a.get(), 1);
            check_eq!(stage.env.fake.count(Count::Leased), 1);
            drop(bad);
            check_eq!(stage.env.log.b.get(), 0);
            drop(client);
            check_eq!(stage.env.log.b.get(), 1);
            stage.check_clean();
            drop(good);
        }
        stage.end()
    }

    #[test]
    fn a_device_that_goes_under_load_takes_all_down() -> Result {
        let stage = Stage::new(Setup::new(), |t| {
            t.fake().pump();
            for _ in 0..4 {
                let qp = t.connected::<Softirq>(8, 8, post_again)?;
                for tag in 0..8 {
                    qp.post_send(t.request(tag, 8)?)?;
                }
                t.keep(qp)?;
            }
            Ok(())
        })?;
        let client = join()?;
        let device = stage.env.fake.plug()?;
        check_eq!(stage.result(), Ok(()));
        check!(eventually(|| stage.env.log.sent.get() > 200));
        // The device goes, not the client.
        drop(device);
        stage.check_clean();
        drop(client);
        stage.end()
    }

    #[test]
    fn the_owner_is_the_client_s_name() -> Result {
        with_device(Setup::new(), |t| {
            check_eq!(t.dev.owner().to_bytes(), b"rdma_kunit");
            Ok(())
        })
    }
}
