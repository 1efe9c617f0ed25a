// SPDX-License-Identifier: GPL-2.0

//! Completions: what a handler is told, where it runs, and what it may do with the request.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_completion)]
mod tests {
    use crate::{
        fake::{
            Count,
            Flush,
            Place,
            Setup,
            Wc, //
        },
        harness::*, //
    };
    use kernel::{
        new_spinlock_irq,
        prelude::*,
        str::CString,
        sync::SpinLockIrq, //
    };
    use rdma::{
        context::{
            PollContext,
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        qp::{
            Depths,
            Handler,
            QueuePair, //
        },
        request::WorkRequest, //
    };

    /// C constants: `IB_WC_WR_FLUSH_ERR`, `IB_WC_GENERAL_ERR`.
    const FLUSH_ERR: u32 = 5;
    const GENERAL_ERR: u32 = 21;

    fn every_status<C: Poolable>(t: &mut Test<'_>) -> Result {
        let unknown = [GENERAL_ERR + 1, 200, 0x8000_0000, u32::MAX];
        let statuses = Iterator::chain(1..=GENERAL_ERR, unknown);
        for (i, status) in statuses.enumerate() {
            let qp = t.connected::<C>(1, 1, drop_it)?;
            let before = t.log().completed();
            qp.post_send(t.request(i as u32, 8)?)?;
            qp.post_recv(t.request(i as u32, 8)?)?;
            let wc = Wc {
                vendor_err: 1000 + status % 1000,
                ..Wc::failed(status)
            };
            t.fake().complete_send(qp.num(), wc)?;
            check!(t.completed(before + 1));
            check_eq!(t.log().last_status.get(), status);
            check_eq!(t.log().last_vendor_err.get(), 1000 + status % 1000);
            t.fake().complete_recv(qp.num(), wc)?;
            check!(t.completed(before + 2));
            check_eq!(t.log().last_status.get(), status);
            check_eq!(t.log().returned(i as u32), 2);
            qp.close(t.may_wait)?;
            check_eq!(t.log().completed(), before + 2);
        }
        check_eq!(t.log().flushed.get(), 2);
        check_eq!(t.log().failed.get(), 2 * (GENERAL_ERR + 3));
        check_eq!(t.log().succeeded.get(), 0);
        Ok(())
    }

    #[test]
    fn every_status_known_or_not_comes_back_in_softirq() -> Result {
        with_device(Setup::new(), every_status::<Softirq>)
    }

    #[test]
    fn every_status_known_or_not_comes_back_in_a_worker() -> Result {
        with_device(Setup::new(), every_status::<Workqueue>)
    }

    #[test]
    fn every_status_known_or_not_comes_back_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), every_status::<UnboundWorkqueue>)
    }

    #[test]
    fn a_failure_of_any_status_can_be_printed() -> Result {
        with_device(Setup::new(), |t| {
            for status in [1, FLUSH_ERR, GENERAL_ERR, GENERAL_ERR + 1, 200, u32::MAX] {
                let qp = t.connected::<Workqueue>(1, 1, |call, request| {
                    drop(request);
                    let Err(failure) = call.completion.result() else {
                        return;
                    };
                    let Ok(text) = CString::try_from_fmt(fmt!("{failure}")) else {
                        return;
                    };
                    let text = text.to_bytes();
                    let Ok(numbers) = CString::try_from_fmt(fmt!(
                        " (status {}, vendor error 0x77): ",
                        failure.raw_status()
                    )) else {
                        return;
                    };
                    let numbers = numbers.to_bytes();
                    // It begins with words, goes on with the numbers, and ends with a hint.
                    let at = text.windows(numbers.len()).position(|part| part == numbers);
                    if at.is_some_and(|at| at > 0) && text.ends_with(failure.hint().as_bytes()) {
                        call.log().a.add();
                    }
                })?;
                let before = t.log().completed();
                qp.post_send(t.request(0, 8)?)?;
                t.fake().complete_send(qp.num(), Wc::failed(status))?;
                check!(t.completed(before + 1));
            }
            check_eq!(t.log().a.get(), 6);
            Ok(())
        })
    }

    #[test]
    fn the_length_of_a_receive_is_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, drop_it)?;
            for (i, len) in [0, 1, 7, 8].into_iter().enumerate() {
                t.post_soon(0, |request| qp.post_recv(request))?;
                t.fake().complete_recv(qp.num(), Wc::ok(len))?;
                check!(t.completed(i as u32 + 1));
                check_eq!(t.log().last_byte_len.get(), len);
            }
            Ok(())
        })
    }

    #[test]
    fn a_length_beyond_the_buffer_reaches_no_memory() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, mut request| {
                let Ok(success) = call.completion.result() else {
                    return;
                };
                let len = usize::try_from(success.byte_len()).unwrap_or(usize::MAX);
                // The buffer is what it was made, whatever the device says.
                if request.data_mut().len() == 8 && request.buffer().len() == 8 {
                    call.log().a.add();
                }
                if request.buffer().get(..len).is_none() {
                    call.log().b.add();
                }
            })?;
            for (i, len) in [9, 4096, u32::MAX - 1, u32::MAX].into_iter().enumerate() {
                t.post_soon(0, |request| qp.post_recv(request))?;
                t.fake().complete_recv(qp.num(), Wc::ok(len))?;
                check!(t.completed(i as u32 + 1));
            }
            check_eq!(t.log().a.get(), 4);
            check_eq!(t.log().b.get(), 4);
            Ok(())
        })
    }

    #[test]
    fn what_the_device_wrote_is_in_the_buffer() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                if request.buffer()[..] == [0xa5, 0xa5, 0xa5, 0xa5, 0xa5, 0, 0, 0] {
                    call.log().a.add();
                }
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(5))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn no_more_is_written_than_was_posted() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                if request.buffer()[..] == [0xa5, 0xa5, 0xa5, 0, 0, 0, 0, 0] {
                    call.log().a.add();
                }
            })?;
            let mut request = t.request(0, 8)?;
            request.set_len(3)?;
            qp.post_recv(request)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn requests_may_complete_in_any_order() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(8, 8, drop_it)?;
            for tag in 0..8 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            // What is left is numbered anew each time.
            for (i, (index, tag)) in [
                (7, 7),
                (0, 0),
                (3, 4),
                (4, 6),
                (1, 2),
                (0, 1),
                (1, 5),
                (0, 3),
            ]
            .into_iter()
            .enumerate()
            {
                t.fake()
                    .complete_at(qp.num(), true, index, Wc::ok(8), Place::Task)?;
                check!(t.completed(i as u32 + 1));
                check_eq!(t.log().last_tag.get(), tag);
            }
            Ok(())
        })
    }

    fn from_anywhere<C: Poolable>(t: &mut Test<'_>) -> Result {
        let qp = t.connected::<C>(1, 1, drop_it)?;
        for (i, place) in Place::ALL.into_iter().enumerate() {
            let i = i as u32;
            t.post_soon(i, |request| qp.post_send(request))?;
            t.post_soon(i, |request| qp.post_recv(request))?;
            t.fake().complete_at(qp.num(), false, 0, Wc::ok(8), place)?;
            t.fake().complete_at(qp.num(), true, 0, Wc::ok(8), place)?;
            check!(t.completed(2 * i + 2));
            check_eq!((place, t.log().returned(i)), (place, 2));
        }
        // That the handlers ran where they should is checked after every test.
        check_eq!(t.log().succeeded.get(), 18);
        Ok(())
    }

    #[test]
    fn a_softirq_handler_runs_in_softirq_wherever_the_interrupt_comes() -> Result {
        with_device(Setup::new(), from_anywhere::<Softirq>)
    }

    #[test]
    fn a_workqueue_handler_runs_in_a_worker_wherever_the_interrupt_comes() -> Result {
        with_device(Setup::new(), from_anywhere::<Workqueue>)
    }

    #[test]
    fn an_unbound_handler_runs_in_a_worker_wherever_the_interrupt_comes() -> Result {
        with_device(Setup::new(), from_anywhere::<UnboundWorkqueue>)
    }

    fn many_at_once<C: Poolable>(t: &mut Test<'_>) -> Result {
        // More than the core handles in one go: 256 in a softirq.
        t.fake().flush_when(Flush::OnDemand);
        let qp = t.connected::<C>(150, 150, drop_it)?;
        for i in 0..150 {
            qp.post_send(t.request(i % 64, 1)?)?;
            qp.post_recv(t.request(i % 64, 1)?)?;
        }
        qp.end(t.may_sleep())?;
        t.fake().flush_all();
        check!(t.completed(300));
        check_eq!(t.log().flushed.get(), 300);
        check!(eventually(|| t.log().tags_dropped.get() == 300));
        check_eq!(t.count(Count::Queued), 0);
        Ok(())
    }

    #[test]
    fn hundreds_at_once_come_back_in_softirq() -> Result {
        with_device(Setup::new(), many_at_once::<Softirq>)
    }

    #[test]
    fn hundreds_at_once_come_back_in_a_worker() -> Result {
        with_device(Setup::new(), many_at_once::<Workqueue>)
    }

    #[test]
    fn hundreds_at_once_come_back_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), many_at_once::<UnboundWorkqueue>)
    }

    #[test]
    fn the_first_repost_never_lacks_room_and_the_second_does() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Workqueue>(2, 2, |call, request| {
                if call.completion.result().is_err() {
                    return;
                }
                check!(call.repost(request).is_ok());
                // Both places are taken now.
                let log = call.log();
                let Ok(more) = new_request(call, 60) else {
                    return;
                };
                let result = if call.recv {
                    call.qp.post_recv(more)
                } else {
                    call.qp.post_send(more)
                };
                check_err!(result, ENOMEM);
                log.a.add();
            })?;
            for tag in 0..2 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(tag, 8)?)?;
            }
            for i in 0..50 {
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(t.completed(2 * i + 2));
                check_eq!(t.fake().sends(qp.num()), 2);
                check_eq!(t.fake().recvs(qp.num()), 2);
            }
            check_eq!(t.log().a.get(), 100);
            Ok(())
        })
    }

    fn new_request<'bound>(
        call: &Call<'_, 'bound, Workqueue>,
        tag: u32,
    ) -> Result<WorkRequest<'bound, Tag>> {
        let dev = call.probe.dev().ok_or(ENODEV)?;
        let buffer = rdma::buffer::DmaBuffer::new(dev, 8, call.context.may_sleep())?;
        WorkRequest::new(buffer, Tag::new(&call.probe.env, tag), GFP_KERNEL)
    }

    #[test]
    fn a_handler_may_post_on_the_other_side_as_far_as_there_is_room() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Workqueue>(1, 1, |call, request| {
                if call.completion.result().is_err() {
                    return;
                }
                // The request of one side becomes one of the other.
                let result = if call.recv {
                    call.qp.post_send(request)
                } else {
                    call.qp.post_recv(request)
                };
                match result {
                    Ok(()) => call.log().a.add(),
                    Err(e) if e.error == ENOMEM => call.log().b.add(),
                    Err(_) => call.log().c.add(),
                };
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            for i in 0..20 {
                let recv = i % 2 == 0;
                t.fake()
                    .complete_at(qp.num(), recv, 0, Wc::ok(8), Place::Task)?;
                check!(t.completed(i + 1));
            }
            check_eq!(t.log().a.get(), 20);
            // Both sides are full now: what comes back finds no room on the other.
            qp.post_send(t.request(1, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(21));
            check_eq!(t.log().b.get(), 1);
            check_eq!(t.log().c.get(), 0);
            Ok(())
        })
    }

    #[test]
    fn a_send_in_a_handler_before_connecting_is_enotconn() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, |call, request| {
                check_err!(call.qp.post_send(request), ENOTCONN);
                call.log().a.add();
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn a_repost_after_a_failure_is_eshutdown() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                check_err!(call.repost(request), ESHUTDOWN);
                call.log().a.add();
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::failed(4))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn a_repost_that_the_driver_refuses_can_be_tried_again() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                if call.completion.result().is_err() {
                    return;
                }
                call.probe.env.fake.fail(crate::fake::Op::PostRecv, EIO);
                let Err(e) = call.qp.post_recv(request) else {
                    return;
                };
                check_eq!(e.error, EIO);
                let Some(request) = e.request else { return };
                // The place is free again.
                check!(call.qp.post_recv(request).is_ok());
                call.log().a.add();
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            for i in 0..10 {
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(t.completed(i + 1));
            }
            check_eq!(t.log().a.get(), 10);
            check_eq!(t.fake().recvs(qp.num()), 1);
            Ok(())
        })
    }

    #[test]
    fn a_request_goes_round_as_often_as_one_likes() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, post_again)?;
            qp.post_send(t.request(3, 8)?)?;
            for i in 0..100 {
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                check!(t.completed(i + 1));
            }
            check_eq!(t.log().returned(3), 100);
            check_eq!(t.log().tags_made.get(), 1);
            check_eq!(t.log().tags_dropped.get(), 0);
            Ok(())
        })
    }

    #[test]
    fn a_handler_may_keep_the_request_for_later() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                // Kept in the handler until the queue pair goes: an atomic allocation, in softirq.
                if call.probe.hold(request).is_err() {
                    call.log().a.add();
                }
            })?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 0);
            check_eq!(t.log().tags_dropped.get(), 0);
            check!(qp.handler().release().is_some());
            check_eq!(t.log().tags_dropped.get(), 1);
            // There was room again at once.
            qp.post_recv(t.request(0, 8)?)?;
            Ok(())
        })
    }

    #[test]
    fn a_workqueue_handler_may_sleep_and_make_things() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Workqueue>(1, 1, |call, request| {
                drop(request);
                let Some(dev) = call.probe.dev() else { return };
                let may_sleep = call.context.may_sleep();
                let lease = rdma::pool::PooledCq::<Softirq>::lease(dev, 4, None, may_sleep);
                check!(lease.is_ok());
                check!(rdma::pd::ProtectionDomain::new(dev, may_sleep).is_ok());
                check!(new_request(call, 1).is_ok());
                call.log().a.add();
            })?;
            for i in 0..5 {
                t.post_soon(0, |request| qp.post_recv(request))?;
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(t.completed(i + 1));
            }
            check_eq!(t.log().a.get(), 5);
            Ok(())
        })
    }

    /// A handler that implements nothing.
    struct Deaf;

    impl<'bound> Handler<'bound> for Deaf {
        type Context = Softirq;
        type Tag = Tag;
    }

    #[test]
    fn a_handler_that_implements_nothing_drops_the_requests() -> Result {
        with_device(Setup::new(), |t| {
            let qp = QueuePair::new::<Error>(
                &t.pd()?,
                t.lease(2, None)?,
                t.dev.port(1)?,
                Depths { send: 1, recv: 1 },
                Ok::<_, Error>(Deaf),
                t.may_sleep(),
            )?;
            t.connect(&qp)?;
            qp.post_send(t.request(0, 8)?)?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(eventually(|| t.log().tags_dropped.get() == 2));
            Ok(())
        })
    }

    #[test]
    fn completions_of_two_queue_pairs_on_one_queue_find_their_own() -> Result {
        with_device(Setup::new(), |t| {
            let a = t.connected::<Softirq>(2, 2, |call, _| {
                call.log().a.add();
            })?;
            let b = t.connected::<Softirq>(2, 2, |call, _| {
                call.log().b.add();
            })?;
            for i in 0..20 {
                t.post_soon(0, |request| a.post_recv(request))?;
                t.post_soon(0, |request| b.post_recv(request))?;
                t.fake().complete_recv(a.num(), Wc::ok(8))?;
                t.fake().complete_recv(b.num(), Wc::ok(8))?;
                check!(t.completed(2 * i + 2));
                check_eq!(t.log().a.get(), i + 1);
                check_eq!(t.log().b.get(), i + 1);
            }
            Ok(())
        })
    }

    #[test]
    fn queues_never_overrun_when_all_completes_at_once() -> Result {
        with_device(Setup::new().max_cqe(16), |t| {
            // Each fills a queue of 16 to the brim.
            t.fake().flush_when(Flush::OnDemand);
            let mut qps = KVec::new();
            for _ in 0..8 {
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                for tag in 0..4 {
                    qp.post_send(t.request(tag, 8)?)?;
                    qp.post_recv(t.request(tag, 8)?)?;
                }
                qps.push(qp, GFP_KERNEL)?;
            }
            t.fake().flush_all();
            check!(t.completed(64));
            // More than that never lay in one queue; how many did depends on who was faster.
            check!(t.count(Count::MostQueued) <= 16);
            Ok(())
        })
    }

    #[test]
    fn handlers_have_names_for_their_contexts() -> Result {
        check_eq!(Softirq::NAME, "softirq");
        check_eq!(Workqueue::NAME, "workqueue");
        check_eq!(UnboundWorkqueue::NAME, "unbound");
        check_eq!(rdma::context::Direct::NAME, "direct");
        outcome()
    }

    #[test]
    fn requests_can_be_handed_out_of_the_handler() -> Result {
        /// Where a handler puts its requests.
        #[pin_data]
        struct Basket<'bound> {
            #[pin]
            requests: SpinLockIrq<KVec<WorkRequest<'bound, Tag>>>,
        }

        struct Collect<'bound>(kernel::sync::Arc<Basket<'bound>>);

        impl<'bound> Handler<'bound> for Collect<'bound> {
            type Context = Softirq;
            type Tag = Tag;

            fn received(
                &self,
                _: &rdma::qp::Poster<'_, 'bound, Self>,
                request: WorkRequest<'bound, Tag>,
                _: &rdma::completion::Completion<'_>,
                _: Softirq,
            ) {
                // There is room: it was reserved.
                let _ = self.0.requests.lock().push_within_capacity(request);
            }
        }

        with_device(Setup::new(), |t| {
            let requests = KVec::with_capacity(4, GFP_KERNEL)?;
            let basket = kernel::sync::Arc::pin_init(
                pin_init!(Basket {
                    requests <- new_spinlock_irq!(requests, "rdma_kunit::Basket"),
                }),
                GFP_KERNEL,
            )?;
            let qp = QueuePair::new::<Error>(
                &t.pd()?,
                t.lease(4, None)?,
                t.dev.port(1)?,
                Depths { send: 0, recv: 4 },
                Ok::<_, Error>(Collect(basket.clone())),
                t.may_sleep(),
            )?;
            for tag in 0..4 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            for _ in 0..4 {
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            }
            check!(eventually(|| basket.requests.lock().len() == 4));
            check_eq!(t.log().tags_dropped.get(), 0);
            while let Some(request) = { basket.requests.lock().pop() } {
                t.post_soon_with(request, |request| qp.post_recv(request))?;
            }
            check_eq!(t.fake().recvs(qp.num()), 4);
            qp.close(t.may_wait)?;
            // Flushed into the basket.
            check_eq!(basket.requests.lock().len(), 4);
            Ok(())
        })
    }
}
