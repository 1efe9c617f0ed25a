// SPDX-License-Identifier: GPL-2.0

//! Teardown: dropped in any order, anywhere, whatever the device does, all comes to an end.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_teardown)]
mod tests {
    use crate::{
        fake::{
            Count,
            Flush,
            Op,
            Place,
            Refusal,
            Setup,
            Wc, //
        },
        harness::*, //
    };
    use kernel::{
        new_mutex,
        prelude::*,
        sync::{
            atomic::{
                Atomic,
                Relaxed, //
            },
            Arc,
            Mutex, //
        },
        time::{
            Instant,
            Monotonic, //
        }, //
    };
    use rdma::{
        buffer::DmaBuffer,
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
        qp::QueuePair,
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    type Shared<'bound, C> = Arc<QueuePair<'bound, Probe<'bound, C>>>;

    /// A task that does nothing, and a listener that hears nothing.
    struct Idle;

    impl<'bound> Task<'bound> for Idle {
        fn run(&self, _: MayWait<'_>) {}
        fn stop(&self) {}
    }

    impl<'bound> Listener<'bound> for Idle {
        fn event(&self, _: Event<'_>, _: MaySleep<'_>) {}
    }

    /// One of each kind, all busy. The queue pair stands on the protection domain.
    fn one_of_each<'bound>(t: &Test<'bound>) -> Result<[Option<KBox<dyn Keep + 'bound>>; 6]> {
        fn boxed<'bound>(object: impl Send + 'bound) -> Result<Option<KBox<dyn Keep + 'bound>>> {
            let object: KBox<dyn Keep + 'bound> = KBox::new(object, GFP_KERNEL)?;
            Ok(Some(object))
        }

        let pd = t.pd()?;
        let lease = t.lease::<Softirq>(5, None)?;
        let qp = t.qp_on(&pd, lease, 2, 2, post_again)?;
        t.connect(&qp)?;
        for tag in 0..2 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag, 8)?)?;
        }
        let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(Idle), t.may_sleep())?;
        work.enqueue();
        Ok([
            boxed(qp)?,
            boxed(pd)?,
            boxed(t.lease::<Workqueue>(9, None)?)?,
            boxed(t.request(5, 8)?)?,
            boxed(work)?,
            boxed(EventHandler::new::<Error>(
                t.dev,
                Ok::<_, Error>(Idle),
                t.may_wait,
            )?)?,
        ])
    }

    /// Takes the next of six objects. The number of an order, of which there are 720, says which.
    fn pick<T>(objects: &mut [Option<T>; 6], order: &mut u32, left: u32) -> Option<T> {
        let nth = *order % left;
        *order /= left;
        objects
            .iter_mut()
            .filter(|object| object.is_some())
            .nth(nth as usize)
            .and_then(Option::take)
    }

    /// Every `step`-th order: on a kernel that checks all it does, each takes a while.
    fn orders_in(t: &Test<'_>, place: Place, step: u32) -> Result {
        let mut order = 0;
        while order < 720 {
            let mut objects = one_of_each(t)?;
            let mut rest = order;
            for left in (1..=6).rev() {
                let object = pick(&mut objects, &mut rest, left);
                check!(object.is_some());
                place.run(move || drop(object));
            }
            order += step;
        }
        check!(eventually(|| t.count(Count::LivePd) == 0));
        check!(eventually(|| t.count(Count::LiveQp) == 0));
        check!(eventually(|| t.count(Count::Leased) == 0));
        check!(eventually(
            || t.log().tags_made.get() == t.log().tags_dropped.get()
        ));
        Ok(())
    }

    #[test]
    fn dropped_in_orders_in_a_task() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Task, 13))
    }

    #[test]
    fn dropped_in_orders_in_a_worker() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Worker, 31))
    }

    #[test]
    fn dropped_in_orders_in_softirq() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Softirq, 31))
    }

    #[test]
    fn dropped_in_orders_in_hardirq() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Hardirq, 37))
    }

    #[test]
    fn dropped_in_many_orders_with_interrupts_off() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::IrqsOff, 31))
    }

    #[test]
    fn dropped_in_many_orders_under_a_spinlock() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Spinlock, 31))
    }

    #[test]
    fn dropped_in_many_orders_with_bottom_halves_off() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::BhOff, 31))
    }

    #[test]
    fn dropped_in_orders_in_an_rcu_section() -> Result {
        with_device(Setup::new(), |t| orders_in(t, Place::Rcu, 31))
    }

    #[test]
    fn dropped_in_many_orders_by_remove() -> Result {
        with_device(Setup::new(), |t| {
            for order in (0..720).step_by(23) {
                let mut objects = one_of_each(t)?;
                let mut rest = order;
                for left in (1..=6).rev() {
                    let object = pick(&mut objects, &mut rest, left);
                    t.keep(object)?;
                }
            }
            Ok(())
        })
    }

    fn dropped_in_a_handler<C: Poolable>(t: &mut Test<'_>) -> Result {
        for order in (0..720).step_by(71) {
            let mut objects = one_of_each(t)?;
            let mut sorted = KVec::new();
            let mut rest = order;
            for left in (1..=6).rev() {
                sorted.push(pick(&mut objects, &mut rest, left), GFP_KERNEL)?;
            }
            let qp = t.connected::<C>(1, 1, |call, request| {
                drop(request);
                drop(call.probe.release());
                call.log().a.add();
            })?;
            qp.handler().hold(sorted)?;
            let before = t.log().a.get();
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(eventually(|| t.log().a.get() > before));
            check!(eventually(|| t.count(Count::LiveQp) == 1));
            qp.close(t.may_wait)?;
            check_eq!(t.count(Count::LiveQp), 0);
        }
        Ok(())
    }

    #[test]
    fn dropped_in_a_softirq_handler() -> Result {
        with_device(Setup::new(), dropped_in_a_handler::<Softirq>)
    }

    #[test]
    fn dropped_in_a_workqueue_handler() -> Result {
        with_device(Setup::new(), dropped_in_a_handler::<Workqueue>)
    }

    #[test]
    fn dropped_in_an_unbound_handler() -> Result {
        with_device(Setup::new(), dropped_in_a_handler::<UnboundWorkqueue>)
    }

    fn drops_itself<C: Poolable>(t: &mut Test<'_>) -> Result {
        for _ in 0..6 {
            let qp: Shared<'_, C> = Arc::new(
                t.connected::<C>(2, 2, |call, request| {
                    // The last handle to the queue pair whose handler this is.
                    drop(call.probe.release());
                    check_err!(call.repost(request), ESHUTDOWN);
                })?,
                GFP_KERNEL,
            )?;
            for tag in 0..2 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(tag, 8)?)?;
            }
            qp.handler().hold(qp.clone())?;
            let num = qp.num();
            drop(qp);
            a_while();
            check_eq!(t.count(Count::LiveQp), 1);
            // The first to come back fails, so that it can't be posted again.
            t.fake().complete_recv(num, Wc::failed(4))?;
            check!(eventually(|| t.count(Count::LiveQp) == 0));
        }
        check_eq!(t.log().completed(), 24);
        check!(eventually(|| t.log().handlers_dropped.get() == 6));
        Ok(())
    }

    #[test]
    fn the_last_handle_dropped_in_its_own_softirq_handler() -> Result {
        with_device(Setup::new(), drops_itself::<Softirq>)
    }

    #[test]
    fn the_last_handle_dropped_in_its_own_workqueue_handler() -> Result {
        with_device(Setup::new(), drops_itself::<Workqueue>)
    }

    #[test]
    fn the_last_handle_dropped_in_its_own_unbound_handler() -> Result {
        with_device(Setup::new(), drops_itself::<UnboundWorkqueue>)
    }

    fn post_for_ever<C: Poolable>(t: &mut Test<'_>) -> Result {
        t.fake().pump();
        let qp = t.connected::<C>(8, 8, post_again)?;
        for tag in 0..8 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag + 8, 8)?)?;
        }
        check!(t.completed(300));
        t.keep(qp)
    }

    fn ended(env: &Env) -> Result {
        check_eq!(env.log.tags_dropped.get(), 16);
        check_eq!(env.log.handlers_dropped.get(), 1);
        Ok(())
    }

    #[test]
    fn a_softirq_handler_that_posts_for_ever_ends_with_remove() -> Result {
        with_device_then(Setup::new(), post_for_ever::<Softirq>, ended)
    }

    #[test]
    fn a_workqueue_handler_that_posts_for_ever_ends_with_remove() -> Result {
        with_device_then(Setup::new(), post_for_ever::<Workqueue>, ended)
    }

    #[test]
    fn an_unbound_handler_that_posts_for_ever_ends_with_remove() -> Result {
        with_device_then(Setup::new(), post_for_ever::<UnboundWorkqueue>, ended)
    }

    fn full<C: Poolable>(t: &mut Test<'_>) -> Result {
        let qp = t.connected::<C>(64, 64, drop_it)?;
        for tag in 0..64 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag, 8)?)?;
        }
        t.keep(qp)
    }

    fn all_flushed(env: &Env) -> Result {
        check_eq!(env.log.flushed.get(), 128);
        for tag in 0..64 {
            check_eq!(env.log.returned(tag), 2);
        }
        Ok(())
    }

    #[test]
    fn full_queues_come_back_in_softirq_when_the_client_goes() -> Result {
        with_device_then(Setup::new(), full::<Softirq>, all_flushed)
    }

    #[test]
    fn full_queues_come_back_in_a_worker_when_the_client_goes() -> Result {
        with_device_then(Setup::new(), full::<Workqueue>, all_flushed)
    }

    #[test]
    fn full_queues_come_back_in_an_unbound_worker_when_the_client_goes() -> Result {
        with_device_then(Setup::new(), full::<UnboundWorkqueue>, all_flushed)
    }

    #[test]
    fn one_that_was_never_connected_goes_with_its_receives() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = t.qp::<Softirq>(1, 4, drop_it)?;
                for tag in 0..4 {
                    qp.post_recv(t.request(tag, 8)?)?;
                }
                t.keep(qp)
            },
            |env| {
                check_eq!(env.log.flushed.get(), 4);
                Ok(())
            },
        )
    }

    #[test]
    fn one_that_never_posted_goes_without_a_flush() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                t.keep(qp)
            },
            |env| {
                check_eq!(env.fake.calls(Op::ModifyErr), 0);
                check_eq!(env.fake.calls(Op::DestroyQp), 1);
                Ok(())
            },
        )
    }

    #[test]
    fn what_failed_and_was_not_flushed_by_the_device_is_flushed() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                for tag in 0..4 {
                    qp.post_send(t.request(tag, 8)?)?;
                }
                t.fake().complete_send(qp.num(), Wc::failed(12))?;
                check!(t.completed(1));
                check_eq!(t.fake().sends(qp.num()), 3);
                t.keep(qp)
            },
            |env| {
                check_eq!(env.log.failed.get(), 1);
                check_eq!(env.log.flushed.get(), 3);
                Ok(())
            },
        )
    }

    #[test]
    fn a_move_to_the_error_state_that_fails_is_survived() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            for tag in 0..4 {
                qp.post_send(t.request(tag, 8)?)?;
            }
            t.fake().fail(Op::ModifyErr, EIO);
            drop(qp);
            check!(eventually(|| t.fake().calls(Op::ModifyErr) == 1));
            a_while();
            // Nothing came back, so it is still there.
            check_eq!(t.count(Count::LiveQp), 1);
            check_eq!(t.log().completed(), 0);
            t.fake().flush_all();
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            check_eq!(t.log().completed(), 4);
            Ok(())
        })
    }

    #[test]
    fn late_completions_are_waited_for() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            let qp = t.connected::<Workqueue>(2, 2, drop_it)?;
            let num = qp.num();
            for tag in 0..2 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(tag + 2, 8)?)?;
            }
            drop(qp);
            for i in 0..4 {
                a_while();
                check_eq!(t.count(Count::LiveQp), 1);
                check_eq!(t.fake().calls(Op::DestroyQp), 0);
                check_eq!(t.log().handlers_dropped.get(), 0);
                let recv = i % 2 == 0;
                // Even a success may still be on its way.
                t.fake()
                    .complete_at(num, recv, 0, Wc::ok(8), Place::Hardirq)?;
            }
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            check_eq!(t.log().succeeded.get(), 4);
            Ok(())
        })
    }

    #[test]
    fn a_repost_while_it_goes_is_eshutdown_even_after_a_success() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                check_err!(call.repost(request), ESHUTDOWN);
                call.log().a.add();
            })?;
            let num = qp.num();
            qp.post_send(t.request(0, 8)?)?;
            qp.post_recv(t.request(1, 8)?)?;
            drop(qp);
            check!(eventually(|| t.fake().calls(Op::ModifyErr) == 1));
            t.fake().complete_send(num, Wc::ok(8))?;
            t.fake().complete_recv(num, Wc::ok(8))?;
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            check_eq!(t.log().a.get(), 2);
            Ok(())
        })
    }

    #[test]
    fn dozens_go_side_by_side() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                for _ in 0..48 {
                    let qp = t.connected::<Workqueue>(4, 4, post_again)?;
                    for tag in 0..4 {
                        qp.post_send(t.request(tag, 8)?)?;
                        qp.post_recv(t.request(tag, 8)?)?;
                    }
                    t.keep(qp)?;
                }
                Ok(())
            },
            |env| {
                check_eq!(env.log.flushed.get(), 384);
                check_eq!(env.fake.calls(Op::DestroyQp), 48);
                check_eq!(env.log.handlers_dropped.get(), 48);
                Ok(())
            },
        )
    }

    #[test]
    fn one_that_takes_its_time_does_not_hold_up_the_next() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            for i in 1..=5 {
                let qp = t.connected::<Softirq>(1, 1, drop_it)?;
                qp.post_send(t.request(0, 8)?)?;
                drop(qp);
                check!(eventually(|| t.fake().calls(Op::ModifyErr) == i));
                check_eq!(t.count(Count::LiveQp), i);
            }
            t.fake().flush_all();
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            Ok(())
        })
    }

    #[test]
    fn one_that_cannot_be_destroyed_keeps_all_it_stands_on() -> Result {
        with_device_leaving(
            Setup::new(),
            |t| {
                t.fake().fail_always(Op::DestroyQp, EIO);
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                crate::fake::known_leak(qp.handler());
                t.log().handlers_leaked.add();
                qp.post_send(t.request(0, 8)?)?;
                t.keep(qp)
            },
            |env| {
                check_eq!(env.fake.calls(Op::DestroyQp), 1);
                check_eq!(env.log.flushed.get(), 1);
                check_eq!(env.fake.count(Count::LiveQp), 1);
                // The device may use them: they can't go.
                check_eq!(env.fake.count(Count::LivePd), 1);
                check_eq!(env.fake.count(Count::Leased), 9);
                check_eq!(env.log.handlers_dropped.get(), 0);
                Ok(())
            },
        )
    }

    #[test]
    fn one_that_cannot_be_destroyed_is_survived_by_the_others() -> Result {
        with_device_leaving(
            Setup::new(),
            |t| {
                let pd = t.pd()?;
                for i in 0..3 {
                    let lease = t.lease::<Workqueue>(3, None)?;
                    let qp = t.qp_on(&pd, lease, 1, 1, drop_it)?;
                    t.connect(&qp)?;
                    qp.post_recv(t.request(i, 8)?)?;
                    if i == 0 {
                        crate::fake::known_leak(qp.handler());
                        t.log().handlers_leaked.add();
                    }
                    t.keep(qp)?;
                }
                t.keep(pd)?;
                t.fake().fail(Op::DestroyQp, EBUSY);
                Ok(())
            },
            |env| {
                check_eq!(env.log.flushed.get(), 3);
                check_eq!(env.fake.count(Count::LiveQp), 1);
                check_eq!(env.fake.count(Count::LivePd), 1);
                check_eq!(env.fake.count(Count::Leased), 3);
                Ok(())
            },
        )
    }

    /// Queue pairs with a request in flight on either side, which the client keeps.
    fn with_requests<C: Poolable>(t: &mut Test<'_>, num: u32, come_back: bool) -> Result {
        for _ in 0..num {
            let qp = t.connected::<C>(1, 1, post_again)?;
            let (send, recv) = (t.request(1, 8)?, t.request(2, 8)?);
            if !come_back {
                crate::fake::known_leak(qp.handler());
                crate::fake::known_leak(send.tag());
                crate::fake::known_leak(recv.tag());
                t.log().handlers_leaked.add();
                t.log().tags_leaked.add();
                t.log().tags_leaked.add();
            }
            qp.post_send(send)?;
            qp.post_recv(recv)?;
            t.keep(qp)?;
        }
        Ok(())
    }

    #[test]
    fn requests_that_never_come_back_are_given_up_and_kept() -> Result {
        let _impatient = Impatient::new();
        let start = Instant::<Monotonic>::now();
        let result = with_device_then(
            Setup::new(),
            |t| {
                t.fake().flush_when(Flush::OnDemand);
                with_requests::<Softirq>(t, 2, false)?;
                with_requests::<Workqueue>(t, 2, false)
            },
            |env| {
                check_eq!(env.log.completed(), 0);
                // The memory stays; the kernel's objects went.
                check_eq!(env.log.tags_dropped.get(), 0);
                check_eq!(env.log.handlers_dropped.get(), 0);
                // Each, and the one by which it was tried to bring its requests back.
                check_eq!(env.fake.calls(Op::DestroyQp), 8);
                Ok(())
            },
        );
        // The patience together, and as much for each.
        check!(start.elapsed().as_millis() < 6_000);
        outcome().and(result)
    }

    fn back_by_destruction<C: Poolable>(t: &mut Test<'_>) -> Result {
        t.fake().flush_when(Flush::OnDestroy);
        with_requests::<C>(t, 2, true)
    }

    fn all_came_back(env: &Env) -> Result {
        check_eq!(env.log.flushed.get(), 4);
        check_eq!(env.log.tags_dropped.get(), 4);
        check_eq!(env.log.handlers_dropped.get(), 2);
        Ok(())
    }

    #[test]
    fn requests_that_come_back_by_destruction_only_are_handled_in_softirq() -> Result {
        let _impatient = Impatient::new();
        with_device_then(Setup::new(), back_by_destruction::<Softirq>, all_came_back)
    }

    #[test]
    fn requests_that_come_back_by_destruction_only_are_handled_in_a_worker() -> Result {
        let _impatient = Impatient::new();
        with_device_then(
            Setup::new(),
            back_by_destruction::<UnboundWorkqueue>,
            all_came_back,
        )
    }

    #[test]
    fn requests_that_come_back_after_a_failed_destruction_are_handled() -> Result {
        let _impatient = Impatient::new();
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            t.fake().fail_always(Op::DestroyQp, EBUSY);
            let qp = t.connected::<Softirq>(1, 1, post_again)?;
            qp.post_send(t.request(1, 8)?)?;
            qp.post_recv(t.request(2, 8)?)?;
            drop(qp);
            check!(eventually(|| t.fake().calls(Op::DestroyQp) >= 1));
            check_eq!(t.log().handlers_dropped.get(), 0);
            t.fake().heal(Op::DestroyQp);
            t.fake().flush_all();
            check!(eventually(|| t.log().handlers_dropped.get() == 1));
            check_eq!(t.log().returned(1), 1);
            check_eq!(t.log().returned(2), 1);
            check_eq!(t.count(Count::LivePd), 0);
            Ok(())
        })
    }

    #[test]
    fn one_that_cannot_be_destroyed_with_a_request_in_flight_is_tried_again() -> Result {
        with_device(Setup::new(), |t| {
            // The driver doesn't say that it took the request, and only gives it back at the end.
            t.fake().refuse(Refusal::Taken);
            t.fake().flush_when(Flush::OnDestroy);
            t.fake().fail(Op::PostSend, EIO);
            t.fake().fail_after(Op::DestroyQp, 0, 2, EBUSY);
            let qp = t.connected::<Workqueue>(1, 1, drop_it)?;
            check!(qp.post_send(t.request(3, 8)?).is_err());
            qp.close(t.may_wait)?;
            // And the one by which the request was brought back.
            check_eq!(t.fake().calls(Op::DestroyQp), 4);
            check_eq!(t.log().returned(3), 1);
            check_eq!(t.count(Count::LivePd), 0);
            check_eq!(t.log().handlers_dropped.get(), 1);
            Ok(())
        })
    }

    /// Makes things for as long as it is let.
    struct Maker<'bound> {
        dev: &'bound Device<'bound>,
        env: Arc<Env>,
        stop: Atomic<bool>,
    }

    impl<'bound> Task<'bound> for Maker<'bound> {
        fn run(&self, may_wait: MayWait<'_>) {
            let may_sleep = may_wait.may_sleep();
            let mut kept = KVec::new();
            while !self.stop.load(Relaxed) {
                let Ok(lease) = PooledCq::<Softirq>::lease(self.dev, 16, None, may_sleep) else {
                    self.env.log.b.add();
                    continue;
                };
                let pd = ProtectionDomain::new(self.dev, may_sleep);
                let buffer = DmaBuffer::new(self.dev, 64, may_sleep);
                if kept.len() < 16 {
                    let _ = kept.push((lease, pd, buffer), GFP_KERNEL);
                } else {
                    kept.clear();
                }
                self.env.log.a.add();
            }
        }

        fn stop(&self) {
            self.stop.store(true, Relaxed);
        }
    }

    fn makers(t: &mut Test<'_>, num: usize) -> Result {
        for _ in 0..num {
            let task = Maker {
                dev: t.dev,
                env: t.env.clone(),
                stop: Atomic::new(false),
            };
            let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
            check!(work.enqueue());
            t.keep(work)?;
        }
        check!(eventually(|| t.log().a.get() > 40));
        Ok(())
    }

    #[test]
    fn what_is_leased_while_the_client_goes_goes_back() -> Result {
        with_device_then(
            Setup::new(),
            |t| makers(t, 4),
            |env| {
                check!(env.log.a.get() > 40);
                check_eq!(env.log.b.get(), 0);
                Ok(())
            },
        )
    }

    /// Posts for as long as it is let.
    #[pin_data]
    struct PostLoop<'bound> {
        #[pin]
        qp: Mutex<Option<Shared<'bound, Softirq>>>,
        env: Arc<Env>,
        dev: &'bound Device<'bound>,
    }

    impl<'bound> Task<'bound> for PostLoop<'bound> {
        fn run(&self, may_wait: MayWait<'_>) {
            let Some(qp) = self.qp.lock().take() else {
                return;
            };
            loop {
                let Ok(buffer) = DmaBuffer::new(self.dev, 8, may_wait.may_sleep()) else {
                    return;
                };
                let tag = Tag::new(&self.env, 1);
                let Ok(request) = rdma::request::WorkRequest::new(buffer, tag, GFP_KERNEL) else {
                    return;
                };
                match qp.post_send(request) {
                    Ok(()) => {
                        self.env.log.a.add();
                    }
                    Err(e) if e.error == ENOMEM => {
                        self.env.log.b.add();
                        kernel::time::delay::udelay(kernel::time::Delta::from_micros(2));
                    }
                    Err(e) => {
                        check_eq!(e.error, ESHUTDOWN);
                        check!(e.request.is_some());
                        self.env.log.c.add();
                        return;
                    }
                }
            }
        }

        fn stop(&self) {}
    }

    fn post_loops<'bound>(t: &mut Test<'bound>) -> Result<Shared<'bound, Softirq>> {
        t.fake().echo(true);
        let qp = Arc::new(t.connected::<Softirq>(4, 4, drop_it)?, GFP_KERNEL)?;
        for _ in 0..4 {
            let (shared, env, dev) = (qp.clone(), t.env.clone(), t.dev);
            let task = try_pin_init!(PostLoop {
                qp <- new_mutex!(Some(shared), "rdma_kunit::PostLoop::qp"),
                env,
                dev,
            });
            let work = ScopedWork::new(t.dev, task, t.may_sleep())?;
            check!(work.enqueue());
            t.keep(work)?;
        }
        check!(eventually(|| t.log().a.get() > 100));
        Ok(qp)
    }

    #[test]
    fn posts_that_race_the_end_are_refused_and_all_come_back() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = post_loops(t)?;
                qp.end(t.may_sleep())?;
                check!(eventually(|| t.log().c.get() == 4));
                Ok(())
            },
            |env| {
                // Each went one way or the other.
                let log = &env.log;
                check_eq!(log.tags_made.get(), log.a.get() + log.b.get() + log.c.get());
                check_eq!(log.sent.get(), log.a.get());
                Ok(())
            },
        )
    }

    #[test]
    fn posts_that_race_the_failure_of_a_request_are_refused() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let qp = post_loops(t)?;
                t.fake().echo(false);
                let failed = || {
                    t.fake().complete_send(qp.num(), Wc::failed(12)).is_ok()
                        || t.log().failed.get() > 0
                };
                check!(eventually(failed));
                check!(eventually(|| t.log().c.get() == 4));
                Ok(())
            },
            |env| {
                check_eq!(env.log.sent.get(), env.log.a.get());
                Ok(())
            },
        )
    }

    /// Makes queue pairs, has them work, and drops them, for as long as it is let.
    struct Churn<'bound> {
        dev: &'bound Device<'bound>,
        env: Arc<Env>,
        stop: Atomic<bool>,
    }

    impl<'bound> Churn<'bound> {
        fn turn(&self, i: u32, may_wait: MayWait<'_>) -> Result {
            let may_sleep = may_wait.may_sleep();
            let qp = QueuePair::new(
                &ProtectionDomain::new(self.dev, may_sleep)?,
                PooledCq::<Softirq>::lease(self.dev, 9, None, may_sleep)?,
                self.dev.port(1)?,
                rdma::qp::Depths { send: 4, recv: 4 },
                Probe::new(&self.env, None, post_again),
                may_sleep,
            )?;
            let peer = qp.endpoint(0, may_sleep)?;
            qp.connect(&peer, 0, may_sleep)?;
            for tag in 0..4 {
                let buffer = DmaBuffer::new(self.dev, 8, may_sleep)?;
                let tag = Tag::new(&self.env, tag);
                let request = rdma::request::WorkRequest::new(buffer, tag, GFP_KERNEL)?;
                // It may be in the error state already: not its own fault.
                qp.post_send(request)?;
            }
            match i % 4 {
                0 => qp.close(may_wait)?,
                1 => drop(qp),
                2 => {
                    Place::Hardirq.run(move || drop(qp));
                }
                _ => {
                    qp.end(may_sleep)?;
                    Place::Softirq.run(move || drop(qp));
                }
            }
            Ok(())
        }
    }

    impl<'bound> Task<'bound> for Churn<'bound> {
        fn run(&self, may_wait: MayWait<'_>) {
            let mut i = 0;
            while !self.stop.load(Relaxed) {
                check_eq!(self.turn(i, may_wait), Ok(()));
                self.env.log.a.add();
                i += 1;
            }
        }

        fn stop(&self) {
            self.stop.store(true, Relaxed);
        }
    }

    #[test]
    fn queue_pairs_come_and_go_on_all_cpus_until_the_client_does() -> Result {
        with_device(Setup::new().vectors(8).max_cqe(32), |t| {
            t.fake().pump();
            for _ in 0..4 {
                let task = Churn {
                    dev: t.dev,
                    env: t.env.clone(),
                    stop: Atomic::new(false),
                };
                let work = ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(task), t.may_sleep())?;
                check!(work.enqueue());
                t.keep(work)?;
            }
            check!(eventually(|| t.log().a.get() > 40));
            Ok(())
        })
    }

    #[test]
    fn the_last_of_many_handles_takes_it_down() -> Result {
        with_device(Setup::new(), |t| {
            let qp = Arc::new(t.connected::<Softirq>(1, 1, drop_it)?, GFP_KERNEL)?;
            qp.post_recv(t.request(0, 8)?)?;
            let second = qp.clone();
            drop(qp);
            a_while();
            check_eq!(t.count(Count::LiveQp), 1);
            check_eq!(t.log().completed(), 0);
            Place::Hardirq.run(move || drop(second));
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            Ok(())
        })
    }

    #[test]
    fn remove_takes_a_bounded_time() -> Result {
        let start = Instant::<Monotonic>::now();
        let result = with_device(Setup::new(), |t| {
            for _ in 0..12 {
                for object in one_of_each(t)? {
                    t.keep(object)?;
                }
            }
            Ok(())
        });
        if start.elapsed().as_millis() > 20_000 {
            return Err(ETIMEDOUT);
        }
        result
    }
}
