// SPDX-License-Identifier: GPL-2.0

//! Completion queues of one's own: polled by the RDMA core, by handlers called on demand, or by hand.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_cq)]
mod tests {
    use crate::{
        fake::{
            Count,
            Flush,
            Op,
            Place,
            Setup,
            Wc, //
        },
        harness::*, //
    };
    use core::num::NonZero;
    use kernel::{
        prelude::*,
        str::CString,
        sync::{
            atomic::{
                Atomic,
                Relaxed, //
            },
            Arc, //
        }, //
    };
    use rdma::{
        completion::Completion,
        context::{
            Direct,
            MayWait,
            PollContext,
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        cq::CompletionQueue,
        poll::PollSlot,
        qp::{
            Depths,
            Handler,
            Poster,
            QueuePair, //
        },
        request::WorkRequest,
        work::{
            ScopedWork,
            Task, //
        }, //
    };

    type Direction<'bound> = CompletionQueue<'bound, Direct>;

    fn create<'bound, C: PollContext>(
        t: &Test<'bound>,
        min_capacity: u32,
        vector: Option<u32>,
    ) -> Result<CompletionQueue<'bound, C>> {
        CompletionQueue::create(t.dev, min_capacity, vector, t.may_sleep())
    }

    /// A queue pair on a queue, connected to itself.
    fn connected_on<'bound, C: PollContext>(
        t: &Test<'bound>,
        cq: &CompletionQueue<'bound, C>,
        send: u32,
        recv: u32,
        act: Act<'bound, C>,
    ) -> Result<QueuePair<'bound, Probe<'bound, C>>> {
        let qp = t.qp_on(&t.pd()?, cq, send, recv, act)?;
        t.connect(&qp)?;
        Ok(qp)
    }

    fn budget(number: u16) -> NonZero<u16> {
        NonZero::new(number).unwrap_or(NonZero::<u16>::MIN)
    }

    #[test]
    fn capacities_out_of_range_are_einval() -> Result {
        with_device(Setup::new().max_cqe(64), |t| {
            for capacity in [0, 65, 1 << 31, u32::MAX] {
                check_err!(create::<Softirq>(t, capacity, None), EINVAL);
                check_err!(create::<Direct>(t, capacity, Some(0)), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn capacities_beyond_a_c_int_are_einval_whatever_the_device_says() -> Result {
        with_device(Setup::new().max_cqe(u32::MAX), |t| {
            for capacity in [1 << 31, u32::MAX] {
                check_err!(create::<Workqueue>(t, capacity, None), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn a_queue_has_at_least_what_was_asked_for() -> Result {
        with_device(Setup::new().max_cqe(64), |t| {
            for capacity in [1, 2, 63, 64] {
                let cq = create::<Softirq>(t, capacity, None)?;
                check_eq!(cq.min_capacity(), capacity);
                check!(cq.capacity() >= capacity);
                check_eq!(cq.available(), cq.capacity());
            }
            check!(eventually(|| t.count(Count::LiveCq) == 0));
            Ok(())
        })
    }

    #[test]
    fn every_vector_of_the_device_can_be_chosen_and_no_other() -> Result {
        with_device(Setup::new().vectors(8), |t| {
            for vector in 0..8 {
                check_eq!(create::<Softirq>(t, 1, Some(vector))?.vector(), vector);
            }
            for vector in [8, 9, 1 << 31, u32::MAX] {
                check_err!(create::<Softirq>(t, 1, Some(vector)), EINVAL);
            }
            for _ in 0..20 {
                check!(create::<UnboundWorkqueue>(t, 1, None)?.vector() < 8);
            }
            check_eq!(t.fake().calls(Op::CreateCq), 28);
            Ok(())
        })
    }

    #[test]
    fn a_device_without_vectors_has_none_to_choose() -> Result {
        with_device(Setup::new().vectors(0), |t| {
            check_err!(create::<Direct>(t, 1, Some(0)), EINVAL);
            check!(create::<Direct>(t, 1, None).is_ok());
            Ok(())
        })
    }

    #[test]
    fn the_driver_s_errors_are_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            for error in [ENOMEM, EIO, ENOSPC, EINVAL, ETIMEDOUT] {
                t.fake().fail(Op::CreateCq, error);
                check_err!(create::<Softirq>(t, 1, None), error);
                t.fake().fail(Op::CreateCq, error);
                check_err!(create::<Direct>(t, 1, Some(0)), error);
            }
            check_eq!(t.count(Count::LiveCq), 0);
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_making_one_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let error = place.run_here(|| create::<Softirq>(t, 1, None).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn what_debug_shows() -> Result {
        with_device(Setup::new().vectors(4), |t| {
            let cq = create::<Workqueue>(t, 40, Some(3))?;
            let shown = CString::try_from_fmt(fmt!("{:?}", cq))?;
            let wanted = CString::try_from_fmt(fmt!(
                "CompletionQueue {{ device: {}, context: \"workqueue\", vector: 3, \
                 min_capacity: 40, capacity: {} }}",
                t.dev.name(),
                cq.capacity()
            ))?;
            check_eq!(shown.to_bytes(), wanted.to_bytes());
            Ok(())
        })
    }

    #[test]
    fn moderation_is_the_driver_s_business() -> Result {
        with_device(Setup::new(), |t| {
            let cq = create::<Softirq>(t, 40, None)?;
            cq.set_moderation(16, 100, t.may_sleep())?;
            check_eq!(t.fake().calls(Op::ModifyCq), 1);
            t.fake().fail(Op::ModifyCq, EOPNOTSUPP);
            check_err!(cq.set_moderation(16, 100, t.may_sleep()), EOPNOTSUPP);
            check!(!cq.is_moderation_adaptive());
            let refused = Place::Spinlock.run_here(|| cq.set_moderation(1, 1, t.may_sleep()));
            check_eq!(refused, Some(Err(EDEADLK)));
            Ok(())
        })
    }

    /// Traffic on a private queue, whose handle is dropped first.
    fn serves<C: Poolable>(t: &mut Test<'_>) -> Result {
        let cq = create::<C>(t, 64, None)?;
        let qp = connected_on(t, &cq, 4, 4, post_again)?;
        drop(cq);
        for tag in 0..4 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(tag, 8)?)?;
        }
        for i in 0..20 {
            check!(eventually(|| t
                .fake()
                .complete_send(qp.num(), Wc::ok(8))
                .is_ok()));
            check!(eventually(|| t
                .fake()
                .complete_recv(qp.num(), Wc::ok(8))
                .is_ok()));
            check!(t.completed(2 * i + 2));
        }
        check_eq!(t.log().succeeded.get(), 40);
        qp.close(t.may_wait)?;
        check_eq!(t.log().flushed.get(), 8);
        check!(eventually(|| t.count(Count::LiveCq) == 0));
        check_eq!(t.count(Count::Leased), 0);
        Ok(())
    }

    #[test]
    fn it_serves_in_softirq() -> Result {
        with_device(Setup::new(), serves::<Softirq>)
    }

    #[test]
    fn it_serves_in_a_worker() -> Result {
        with_device(Setup::new(), serves::<Workqueue>)
    }

    #[test]
    fn it_serves_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), serves::<UnboundWorkqueue>)
    }

    #[test]
    fn queue_pairs_cannot_exceed_it_together() -> Result {
        with_device(Setup::new().max_cqe(16), |t| {
            let cq = create::<Softirq>(t, 16, None)?;
            let pd = t.pd()?;
            check_err!(t.qp_on(&pd, &cq, 8, 8, drop_it), EINVAL);
            let a = t.qp_on(&pd, &cq, 4, 4, drop_it)?;
            check_eq!(cq.available(), 7);
            check_err!(t.qp_on(&pd, &cq, 4, 3, drop_it), ENOSPC);
            let b = t.qp_on(&pd, &cq, 3, 3, drop_it)?;
            check_eq!(cq.available(), 0);
            check_err!(t.qp_on(&pd, &cq, 1, 0, drop_it), ENOSPC);
            a.close(t.may_wait)?;
            check_eq!(cq.available(), 9);
            let c = t.qp_on(&pd, &cq, 4, 4, drop_it)?;
            t.connect(&b)?;
            t.connect(&c)?;
            for _ in 0..3 {
                b.post_send(t.request(0, 8)?)?;
                b.post_recv(t.request(0, 8)?)?;
                c.post_send(t.request(0, 8)?)?;
                c.post_recv(t.request(0, 8)?)?;
            }
            t.fake().flush_all();
            check!(t.completed(12));
            check!(t.count(Count::MostQueued) <= 16);
            Ok(())
        })
    }

    #[test]
    fn a_queue_pair_that_could_not_be_made_claims_nothing() -> Result {
        with_device(Setup::new(), |t| {
            let cq = create::<Workqueue>(t, 16, None)?;
            t.fake().fail(Op::CreateQp, ENOMEM);
            check_err!(t.qp_on(&t.pd()?, &cq, 4, 4, drop_it), ENOMEM);
            t.fake().fail(Op::ModifyInit, EIO);
            check_err!(t.qp_on(&t.pd()?, &cq, 4, 4, drop_it), EIO);
            check!(eventually(|| cq.available() == cq.capacity()));
            Ok(())
        })
    }

    #[test]
    fn the_last_handle_may_be_dropped_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ALL {
                let cq = create::<Softirq>(t, 16, None)?;
                let second = cq.clone();
                drop(cq);
                a_while();
                check_eq!(t.count(Count::LiveCq), 1);
                place.run(move || drop(second));
                check!(eventually(|| t.count(Count::LiveCq) == 0));
            }
            Ok(())
        })
    }

    fn in_its_own_handler<C: Poolable>(t: &mut Test<'_>) -> Result {
        let cq = create::<C>(t, 16, None)?;
        let qp = Arc::new(
            connected_on(t, &cq, 1, 1, |call, request| {
                drop(request);
                // The queue pair, and the queue with it.
                drop(call.probe.release());
            })?,
            GFP_KERNEL,
        )?;
        drop(cq);
        qp.post_send(t.request(0, 8)?)?;
        let num = qp.num();
        qp.handler().hold(qp.clone())?;
        drop(qp);
        t.fake().complete_send(num, Wc::ok(8))?;
        check!(eventually(|| t.count(Count::LiveCq) == 0));
        check_eq!(t.log().handlers_dropped.get(), 1);
        Ok(())
    }

    #[test]
    fn the_last_handle_dropped_in_its_own_softirq_handler() -> Result {
        with_device(Setup::new(), in_its_own_handler::<Softirq>)
    }

    #[test]
    fn the_last_handle_dropped_in_its_own_worker() -> Result {
        with_device(Setup::new(), in_its_own_handler::<Workqueue>)
    }

    #[test]
    fn a_leaked_one_goes_with_the_client() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let cq = create::<Softirq>(t, 16, None)?;
                t.leak(cq.clone())?;
                t.leak(create::<Direct>(t, 16, None)?)?;
                let qp = connected_on(t, &cq, 2, 2, post_again)?;
                qp.post_recv(t.request(1, 8)?)?;
                t.log().handlers_leaked.add();
                t.leak(qp)
            },
            |env| {
                check_eq!(env.log.flushed.get(), 1);
                check_eq!(env.fake.count(Count::LiveCq), 0);
                Ok(())
            },
        )
    }

    #[test]
    fn one_under_a_queue_pair_that_cannot_be_destroyed_stays() -> Result {
        with_device_leaving(
            Setup::new(),
            |t| {
                let cq = create::<Workqueue>(t, 16, None)?;
                let qp = connected_on(t, &cq, 2, 2, drop_it)?;
                crate::fake::known_leak(qp.handler());
                t.log().handlers_leaked.add();
                t.fake().fail_always(Op::DestroyQp, EBUSY);
                qp.close(t.may_wait)?;
                t.fake().heal(Op::DestroyQp);
                drop(cq);
                a_while();
                check_eq!(t.count(Count::LiveCq), 1);
                Ok(())
            },
            |env| {
                check_eq!(env.fake.count(Count::LiveCq), 1);
                Ok(())
            },
        )
    }

    #[test]
    fn forgotten_sends_come_back_on_a_private_queue() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            let cq = create::<UnboundWorkqueue>(t, 16, None)?;
            let qp = connected_on(t, &cq, 4, 4, post_again)?;
            for tag in 0..4 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(4 + tag, 8)?)?;
            }
            qp.close(t.may_wait)?;
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            check_eq!(cq.available(), cq.capacity());
            Ok(())
        })
    }

    // --- direct: handlers on demand ---------------------------------------------------------------

    /// A direct queue, and a queue pair with eight sends posted, of which `complete` are complete.
    fn eight_sends<'bound>(
        t: &Test<'bound>,
        complete: u32,
        act: Act<'bound, Direct>,
    ) -> Result<(Direction<'bound>, QueuePair<'bound, Probe<'bound, Direct>>)> {
        let cq = create::<Direct>(t, 64, None)?;
        let qp = connected_on(t, &cq, 8, 8, act)?;
        for tag in 0..8 {
            qp.post_send(t.request(tag, 8)?)?;
        }
        for _ in 0..complete {
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
        }
        Ok((cq, qp))
    }

    #[test]
    fn nothing_is_handled_until_somebody_asks() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, _qp) = eight_sends(t, 5, drop_it)?;
            a_while();
            check_eq!(t.log().completed(), 0);
            check_eq!(cq.process(budget(2)), 2);
            check_eq!(t.log().completed(), 2);
            check_eq!(cq.process(budget(100)), 3);
            check_eq!(t.log().completed(), 5);
            check_eq!(cq.process(budget(100)), 0);
            for tag in 0..8 {
                check_eq!(t.log().returned(tag), u32::from(tag < 5));
            }
            Ok(())
        })
    }

    #[test]
    fn handlers_are_called_where_they_are_asked_for() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 0, post_again)?;
            for (done, place) in (1..).zip(Place::ALL) {
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                check_eq!(
                    (place, place.run(|| cq.process(budget(9)))),
                    (place, Some(1))
                );
                check_eq!(t.log().completed(), done);
            }
            Ok(())
        })
    }

    /// Asks for more in the handler.
    struct Nested<'bound> {
        cq: Direction<'bound>,
        handled: Atomic<u32>,
        nested: Atomic<u32>,
    }

    impl<'bound> Handler<'bound> for Nested<'bound> {
        type Context = Direct;
        type Tag = Tag;

        fn sent(
            &self,
            _: &Poster<'_, 'bound, Self>,
            _: WorkRequest<'bound, Tag>,
            _: &Completion<'_>,
            _: Direct,
        ) {
            self.handled.fetch_add(1, Relaxed);
            self.nested
                .fetch_add(self.cq.process(NonZero::<u16>::MAX), Relaxed);
            let mut slots = [const { PollSlot::new() }; 2];
            check!(self
                .cq
                .poll(&mut slots)
                .is_ok_and(|polled| polled.is_empty()));
        }
    }

    #[test]
    fn a_handler_that_asks_for_more_gets_none() -> Result {
        with_device(Setup::new(), |t| {
            let cq = create::<Direct>(t, 64, None)?;
            let nested = Nested {
                cq: cq.clone(),
                handled: Atomic::new(0),
                nested: Atomic::new(0),
            };
            let qp = QueuePair::<Nested<'_>>::new(
                &t.pd()?,
                &cq,
                t.dev.port(1)?,
                Depths { send: 8, recv: 0 },
                Ok::<_, Error>(nested),
                t.may_sleep(),
            )?;
            t.connect(&qp)?;
            for tag in 0..8 {
                qp.post_send(t.request(tag, 8)?)?;
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
            }
            check_eq!(cq.process(budget(100)), 8);
            check_eq!(qp.handler().handled.load(Relaxed), 8);
            check_eq!(qp.handler().nested.load(Relaxed), 0);
            Ok(())
        })
    }

    #[test]
    fn teardown_handles_what_nobody_asks_for() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 3, post_again)?;
            for tag in 8..12 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            qp.close(t.may_wait)?;
            for tag in 0..12 {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            check_eq!(t.log().succeeded.get(), 3);
            check_eq!(cq.process(budget(1)), 0);
            Ok(())
        })
    }

    #[test]
    fn teardown_handles_what_was_dropped_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            for (i, place) in (1..).zip(Place::ALL) {
                let (cq, qp) = eight_sends(t, 3, post_again)?;
                place.run(move || drop((qp, cq)));
                check!(eventually(|| t.log().handlers_dropped.get() == i));
                check_eq!(t.log().completed(), 8 * i);
            }
            check!(eventually(|| t.count(Count::LiveCq) == 0));
            Ok(())
        })
    }

    #[test]
    fn the_client_s_end_handles_what_it_leaked() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let (cq, qp) = eight_sends(t, 3, post_again)?;
                t.log().handlers_leaked.add();
                t.leak((cq, qp))
            },
            |env| {
                check_eq!(env.log.completed(), 8);
                check_eq!(env.log.tags_dropped.get(), 8);
                Ok(())
            },
        )
    }

    #[test]
    fn forgotten_sends_come_back_on_a_direct_queue() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            let (_cq, qp) = eight_sends(t, 3, drop_it)?;
            qp.close(t.may_wait)?;
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            check_eq!(t.log().flushed.get(), 5);
            Ok(())
        })
    }

    // --- direct: polled by hand ---------------------------------------------------------------------

    #[test]
    fn an_empty_queue_yields_nothing() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, _qp) = eight_sends(t, 0, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 4];
            let polled = cq.poll(&mut slots)?;
            check_eq!(polled.len(), 0);
            check!(polled.is_empty());
            check!(polled.iter().next().is_none());
            Ok(())
        })
    }

    #[test]
    fn no_slots_take_nothing() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, _qp) = eight_sends(t, 3, drop_it)?;
            check!(cq.poll(&mut [])?.is_empty());
            check_eq!(cq.process(budget(9)), 3);
            Ok(())
        })
    }

    #[test]
    fn what_is_polled_hands_back_its_requests_in_order() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 5, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 3];
            let mut tag = 0;
            for expected in [3, 2, 0] {
                let polled = cq.poll(&mut slots)?;
                check_eq!(polled.len(), expected);
                for completion in &polled {
                    check!(completion.result().is_ok());
                    check!(!completion.is_recv());
                    let Ok(request) = completion.into_request(&qp) else {
                        return Err(EINVAL);
                    };
                    check_eq!(request.tag().id, tag);
                    tag += 1;
                    // There is room for it again.
                    check!(qp.post_send(request).is_ok());
                }
            }
            check_eq!(tag, 5);
            // No handler saw any of it.
            check_eq!(t.log().completed(), 0);
            check_eq!(t.fake().sends(qp.num()), 8);
            Ok(())
        })
    }

    #[test]
    fn what_nobody_looks_at_goes_to_its_handler() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 5, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 8];
            let polled = cq.poll(&mut slots)?;
            check!(matches!(
                polled.iter().next().map(|first| first.into_request(&qp)),
                Some(Ok(_))
            ));
            check_eq!(polled.len(), 4);
            // Looked at, but not taken.
            drop(polled.iter().next());
            check_eq!(t.log().completed(), 1);
            drop(polled);
            check_eq!(t.log().completed(), 4);
            for tag in 0..8 {
                check_eq!(t.log().returned(tag), u32::from((1..5).contains(&tag)));
            }
            Ok(())
        })
    }

    #[test]
    fn a_request_of_another_queue_pair_cannot_be_had() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, a) = eight_sends(t, 0, drop_it)?;
            let b = connected_on(t, &cq, 4, 4, drop_it)?;
            b.post_recv(t.request(20, 8)?)?;
            t.fake().complete_recv(b.num(), Wc::failed(4))?;
            let mut slots = [const { PollSlot::new() }; 8];
            {
                let polled = cq.poll(&mut slots)?;
                let Some(completion) = polled.iter().next() else {
                    return Err(EINVAL);
                };
                check!(completion.is_recv());
                check!(completion.is_of(&b) && !completion.is_of(&a));
                let Err(completion) = completion.into_request(&a) else {
                    return Err(EINVAL);
                };
                check!(completion.result().is_err());
                check_eq!(
                    completion.into_request(&b).map(|r| r.tag().id).ok(),
                    Some(20)
                );
            }
            // It failed, and that is the end of it.
            check_err!(b.post_recv(t.request(0, 8)?), ESHUTDOWN);
            check_eq!(t.log().completed(), 0);
            Ok(())
        })
    }

    #[test]
    fn while_somebody_polls_there_is_nothing_for_others() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, _qp) = eight_sends(t, 5, drop_it)?;
            let (mut first, mut second) = (
                [const { PollSlot::new() }; 2],
                [const { PollSlot::new() }; 2],
            );
            let polled = cq.poll(&mut first)?;
            check_eq!(polled.len(), 2);
            check!(cq.poll(&mut second)?.is_empty());
            check_eq!(cq.process(budget(9)), 0);
            drop(polled);
            check_eq!(cq.poll(&mut second)?.len(), 2);
            check_eq!(cq.process(budget(9)), 1);
            check_eq!(t.log().completed(), 5);
            Ok(())
        })
    }

    #[test]
    fn who_has_polled_completions_cannot_wait_for_the_rest() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 5, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 2];
            let polled = cq.poll(&mut slots)?;
            // It would wait for what is polled, too.
            check_eq!(qp.close(t.may_wait), Err(EDEADLK));
            a_while();
            check_eq!(t.log().handlers_dropped.get(), 0);
            drop(polled);
            check!(eventually(|| t.log().handlers_dropped.get() == 1));
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            // Who has none can.
            let (_cq, qp) = eight_sends(t, 5, drop_it)?;
            check_eq!(qp.close(t.may_wait), Ok(()));
            Ok(())
        })
    }

    #[test]
    fn polling_may_be_done_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, qp) = eight_sends(t, 0, drop_it)?;
            for place in Place::ALL {
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                let reposted = place.run(|| {
                    let mut slots = [const { PollSlot::new() }; 2];
                    let polled = cq.poll(&mut slots)?;
                    let number = polled.len();
                    for completion in &polled {
                        let request = completion.into_request(&qp).map_err(|_| EINVAL)?;
                        qp.post_send(request)?;
                    }
                    Ok::<_, Error>(number)
                });
                check_eq!((place, reposted), (place, Some(Ok(1))));
            }
            Ok(())
        })
    }

    #[test]
    fn a_driver_that_cannot_poll_says_so() -> Result {
        with_device(Setup::new(), |t| {
            let (cq, _qp) = eight_sends(t, 2, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 2];
            t.fake().fail(Op::PollCq, EIO);
            check_err!(cq.poll(&mut slots), EIO);
            t.fake().fail(Op::PollCq, EIO);
            check_eq!(cq.process(budget(9)), 0);
            check_eq!(cq.poll(&mut slots)?.len(), 2);
            Ok(())
        })
    }

    #[test]
    fn a_completion_that_is_forgotten_comes_back_when_its_queue_pair_goes() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            let (cq, qp) = eight_sends(t, 2, drop_it)?;
            let mut slots = [const { PollSlot::new() }; 2];
            let polled = cq.poll(&mut slots)?;
            core::mem::forget(polled.iter().next());
            drop(polled);
            qp.close(t.may_wait)?;
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            Ok(())
        })
    }

    #[test]
    fn what_is_polled_and_forgotten_ends_in_bounded_time() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            let cq = create::<Direct>(t, 64, None)?;
            let qp = connected_on(t, &cq, 1, 1, drop_it)?;
            let request = t.request(1, 8)?;
            crate::fake::known_leak(qp.handler());
            crate::fake::known_leak(request.tag());
            t.log().handlers_leaked.add();
            t.log().tags_leaked.add();
            qp.post_send(request)?;
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
            let mut slots = [const { PollSlot::new() }; 2];
            core::mem::forget(cq.poll(&mut slots)?);
            // Somebody polls, and will for ever: nobody else can.
            check_eq!(qp.close(t.may_wait), Err(EDEADLK));
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            check_eq!(t.log().completed(), 0);
            Ok(())
        })
    }

    /// Polls for as long as it is let, now by hand, now by handlers.
    struct Poller<'bound> {
        cq: Direction<'bound>,
        qp: Arc<QueuePair<'bound, Probe<'bound, Direct>>>,
        env: Arc<Env>,
        stop: Atomic<bool>,
    }

    impl<'bound> Task<'bound> for Poller<'bound> {
        fn run(&self, _: MayWait<'_>) {
            let mut slots = [const { PollSlot::new() }; 3];
            let mut turn = 0u32;
            while !self.stop.load(Relaxed) {
                turn += 1;
                if turn % 2 == 0 {
                    self.cq.process(budget(3));
                } else if let Ok(polled) = self.cq.poll(&mut slots) {
                    for completion in &polled {
                        if let Ok(request) = completion.into_request(&self.qp) {
                            self.env.log.a.add();
                            // Refused at the end.
                            let _ = self.qp.post_send(request);
                        }
                    }
                }
                kernel::time::delay::fsleep(kernel::time::Delta::from_micros(50));
            }
        }

        fn stop(&self) {
            self.stop.store(true, Relaxed);
        }
    }

    #[test]
    fn several_threads_may_poll_one_queue_until_the_client_goes() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let (cq, qp) = eight_sends(t, 0, post_again)?;
                let qp = Arc::new(qp, GFP_KERNEL)?;
                for _ in 0..4 {
                    let poller = Poller {
                        cq: cq.clone(),
                        qp: qp.clone(),
                        env: t.env.clone(),
                        stop: Atomic::new(false),
                    };
                    let work =
                        ScopedWork::new::<Error>(t.dev, Ok::<_, Error>(poller), t.may_sleep())?;
                    check!(work.enqueue());
                    t.keep(work)?;
                }
                t.fake().pump();
                check!(eventually(
                    || t.log().a.get() > 50 && t.log().completed() > 50
                ));
                Ok(())
            },
            |env| {
                check_eq!(env.log.tags_made.get(), 8);
                check_eq!(env.log.tags_dropped.get(), 8);
                Ok(())
            },
        )
    }
}
