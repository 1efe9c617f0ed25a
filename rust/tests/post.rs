// SPDX-License-Identifier: GPL-2.0

//! Posting: how much goes, what is refused, and that a refused request comes back as it was.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_post)]
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
    use kernel::prelude::*;
    use rdma::{
        context::{
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        request::{
            PostError,
            WorkRequest, //
        }, //
    };

    /// A request that can be told from all others.
    fn marked<'bound>(t: &Test<'bound>) -> Result<WorkRequest<'bound, Tag>> {
        let mut request = t.request(42, 16)?;
        request.data_mut().fill(0x5a);
        request.set_len(10)?;
        Ok(request)
    }

    /// Checks that the post was refused with `error`, and the marked request came back as it was.
    fn check_refused(result: Result<(), PostError<'_, Tag>>, error: Error) {
        let Err(e) = result else {
            check!(result.is_err());
            return;
        };
        check_eq!(e.error, error);
        let Some(request) = e.request else {
            check!(e.request.is_some());
            return;
        };
        check_eq!(request.tag().id, 42);
        check_eq!(request.len(), 10);
        check_eq!(&request.buffer()[..], &[0x5a; 16]);
    }

    #[test]
    fn a_send_before_connecting_is_enotconn() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            check_refused(qp.post_send(marked(t)?), ENOTCONN);
            check_eq!(t.fake().calls(Op::PostSend), 0);
            Ok(())
        })
    }

    #[test]
    fn a_receive_before_connecting_is_fine() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            qp.post_recv(t.request(0, 8)?)?;
            check_eq!(t.fake().recvs(qp.num()), 1);
            Ok(())
        })
    }

    #[test]
    fn as_many_sends_as_the_depth_and_not_one_more() -> Result {
        with_device(Setup::new(), |t| {
            for depth in [1, 2, 7, 64] {
                let qp = t.connected::<Softirq>(depth, 1, drop_it)?;
                for _ in 0..depth {
                    qp.post_send(t.request(0, 8)?)?;
                }
                check_eq!(t.fake().sends(qp.num()), depth);
                check_refused(qp.post_send(marked(t)?), ENOMEM);
                check_refused(qp.post_send(marked(t)?), ENOMEM);
                check_eq!(t.fake().sends(qp.num()), depth);
            }
            Ok(())
        })
    }

    #[test]
    fn as_many_receives_as_the_depth_and_not_one_more() -> Result {
        with_device(Setup::new(), |t| {
            for depth in [1, 2, 7, 64] {
                let qp = t.connected::<Softirq>(1, depth, drop_it)?;
                for _ in 0..depth {
                    qp.post_recv(t.request(0, 8)?)?;
                }
                check_eq!(t.fake().recvs(qp.num()), depth);
                check_refused(qp.post_recv(marked(t)?), ENOMEM);
                check_refused(qp.post_recv(marked(t)?), ENOMEM);
                check_eq!(t.fake().recvs(qp.num()), depth);
            }
            Ok(())
        })
    }

    #[test]
    fn the_two_sides_do_not_share_their_room() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 2, drop_it)?;
            qp.post_send(t.request(0, 8)?)?;
            check_refused(qp.post_send(marked(t)?), ENOMEM);
            qp.post_recv(t.request(0, 8)?)?;
            qp.post_recv(t.request(0, 8)?)?;
            check_refused(qp.post_recv(marked(t)?), ENOMEM);
            Ok(())
        })
    }

    #[test]
    fn a_depth_of_zero_has_no_room() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(0, 1, drop_it)?;
            check_refused(qp.post_send(marked(t)?), ENOMEM);
            let qp = t.connected::<Softirq>(1, 0, drop_it)?;
            check_refused(qp.post_recv(marked(t)?), ENOMEM);
            Ok(())
        })
    }

    #[test]
    fn a_completion_makes_room_for_one_more() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(2, 2, drop_it)?;
            for _ in 0..2 {
                qp.post_send(t.request(0, 8)?)?;
                qp.post_recv(t.request(0, 8)?)?;
            }
            for i in 0..20 {
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(t.completed(2 * i + 2));
                // The handler has counted it, but may not have returned yet.
                t.post_soon(0, |request| qp.post_send(request))?;
                t.post_soon(0, |request| qp.post_recv(request))?;
                check_refused(qp.post_send(marked(t)?), ENOMEM);
                check_refused(qp.post_recv(marked(t)?), ENOMEM);
            }
            Ok(())
        })
    }

    #[test]
    fn after_the_end_everything_is_eshutdown() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            qp.end(t.may_sleep())?;
            check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
            check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
            check_eq!(t.fake().calls(Op::PostSend), 0);
            check_eq!(t.fake().calls(Op::PostRecv), 0);
            Ok(())
        })
    }

    #[test]
    fn an_end_that_fails_ends_posting_all_the_same() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            t.fake().fail(Op::ModifyErr, EIO);
            check_err!(qp.end(t.may_sleep()), EIO);
            check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
            check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
            Ok(())
        })
    }

    #[test]
    fn the_end_brings_back_all_that_is_in_flight() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            for tag in 0..4 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(tag + 4, 8)?)?;
            }
            qp.end(t.may_sleep())?;
            check!(t.completed(8));
            check_eq!(t.log().flushed.get(), 8);
            for tag in 0..8 {
                check_eq!(t.log().returned(tag), 1);
            }
            // Ending again is harmless.
            qp.end(t.may_sleep())
        })
    }

    #[test]
    fn after_a_failed_send_everything_is_eshutdown() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            qp.post_send(t.request(0, 8)?)?;
            t.fake().complete_send(qp.num(), Wc::failed(12))?;
            check!(t.completed(1));
            check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
            check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
            Ok(())
        })
    }

    #[test]
    fn after_a_failed_receive_everything_is_eshutdown() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::failed(4))?;
            check!(t.completed(1));
            check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
            check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
            Ok(())
        })
    }

    #[test]
    fn a_receive_that_failed_before_connecting_ends_it() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(4, 4, drop_it)?;
            qp.post_recv(t.request(0, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::failed(4))?;
            check!(t.completed(1));
            check!(t.connect(&qp).is_ok());
            check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
            Ok(())
        })
    }

    #[test]
    fn what_the_driver_refuses_comes_back_with_its_error() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            for error in [ENOMEM, EINVAL, EIO, EAGAIN, ENOBUFS, EOPNOTSUPP] {
                t.fake().fail(Op::PostSend, error);
                check_refused(qp.post_send(marked(t)?), error);
                t.fake().fail(Op::PostRecv, error);
                check_refused(qp.post_recv(marked(t)?), error);
            }
            check_eq!(t.count(Count::PendingSends), 0);
            check_eq!(t.count(Count::PendingRecvs), 0);
            Ok(())
        })
    }

    #[test]
    fn what_the_driver_refuses_takes_no_room() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(3, 3, drop_it)?;
            t.fake().refuse(Refusal::Named);
            t.fake().fail_after(Op::PostSend, 0, 10, EIO);
            t.fake().fail_after(Op::PostRecv, 0, 10, EIO);
            for _ in 0..10 {
                check_refused(qp.post_send(marked(t)?), EIO);
                check_refused(qp.post_recv(marked(t)?), EIO);
            }
            for _ in 0..3 {
                qp.post_send(t.request(0, 8)?)?;
                qp.post_recv(t.request(0, 8)?)?;
            }
            check_refused(qp.post_send(marked(t)?), ENOMEM);
            check_refused(qp.post_recv(marked(t)?), ENOMEM);
            Ok(())
        })
    }

    #[test]
    fn what_was_taken_in_spite_of_an_error_comes_back_once() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().refuse(Refusal::Taken);
            for (i, recv) in [false, true].into_iter().enumerate() {
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                t.fake().fail(Op::PostSend, EIO);
                t.fake().fail(Op::PostRecv, EIO);
                let request = t.request(7 + i as u32, 8)?;
                let Err(e) = (if recv {
                    qp.post_recv(request)
                } else {
                    qp.post_send(request)
                }) else {
                    return Err(EINVAL);
                };
                check_eq!(e.error, EIO);
                check!(e.request.is_none());
                // Nobody knows what state it is in.
                check_refused(qp.post_send(marked(t)?), ESHUTDOWN);
                check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
                qp.close(t.may_wait)?;
                check_eq!(t.log().returned(7 + i as u32), 1);
                check_eq!(t.log().flushed.get(), i as u32 + 1);
                t.fake().heal(Op::PostSend);
                t.fake().heal(Op::PostRecv);
            }
            Ok(())
        })
    }

    fn back_at_the_very_end<C: Poolable>(t: &mut Test<'_>) -> Result {
        t.fake().refuse(Refusal::Taken);
        t.fake().flush_when(Flush::OnDestroy);
        t.fake().fail(Op::PostSend, EIO);
        let qp = t.connected::<C>(4, 4, drop_it)?;
        let Err(e) = qp.post_send(t.request(3, 8)?) else {
            return Err(EINVAL);
        };
        check!(e.request.is_none());
        qp.close(t.may_wait)?;
        // It came back when the queue pair was destroyed: nothing is leaked.
        check_eq!(t.log().returned(3), 1);
        check_eq!(t.log().tags_dropped.get(), 1);
        check_eq!(t.log().handlers_dropped.get(), 1);
        check_eq!(t.count(Count::Leased), 0);
        Ok(())
    }

    #[test]
    fn what_comes_back_at_the_very_end_is_waited_for_in_softirq() -> Result {
        with_device(Setup::new(), back_at_the_very_end::<Softirq>)
    }

    #[test]
    fn what_comes_back_at_the_very_end_is_waited_for_in_a_worker() -> Result {
        with_device(Setup::new(), back_at_the_very_end::<Workqueue>)
    }

    #[test]
    fn what_comes_back_at_the_very_end_is_waited_for_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), back_at_the_very_end::<UnboundWorkqueue>)
    }

    #[test]
    fn a_repost_that_was_taken_in_spite_of_an_error_comes_back_once() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().refuse(Refusal::Taken);
            let qp = t.connected::<Softirq>(1, 1, |call, request| {
                if call.completion.result().is_err() {
                    return;
                }
                call.probe.env.fake.fail(Op::PostRecv, EIO);
                let Err(e) = call.qp.post_recv(request) else {
                    return;
                };
                check_eq!(e.error, EIO);
                check!(e.request.is_none());
                call.log().a.add();
            })?;
            qp.post_recv(t.request(3, 8)?)?;
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(1));
            check_eq!(t.log().a.get(), 1);
            check_refused(qp.post_recv(marked(t)?), ESHUTDOWN);
            qp.close(t.may_wait)?;
            check_eq!(t.log().returned(3), 2);
            check_eq!(t.log().flushed.get(), 1);
            Ok(())
        })
    }

    #[test]
    fn what_the_end_did_not_bring_back_the_drop_does() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            let qp = t.connected::<Softirq>(2, 2, drop_it)?;
            qp.post_send(t.request(0, 8)?)?;
            qp.post_recv(t.request(1, 8)?)?;
            qp.end(t.may_sleep())?;
            a_while();
            check_eq!(t.log().completed(), 0);
            t.fake().flush_when(Flush::AtOnce);
            qp.close(t.may_wait)?;
            check_eq!(t.log().flushed.get(), 2);
            Ok(())
        })
    }

    #[test]
    fn what_was_never_taken_comes_back_when_the_queue_pair_goes() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().refuse(Refusal::Unnamed);
            t.fake().fail(Op::PostSend, EIO);
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            qp.post_recv(t.request(1, 8)?)?;
            let Err(e) = qp.post_send(t.request(0, 8)?) else {
                return Err(EINVAL);
            };
            check_eq!(e.error, EIO);
            check!(e.request.is_none());
            a_while();
            check_eq!(t.log().returned(0), 0);
            let start = kernel::time::Instant::<kernel::time::Monotonic>::now();
            qp.close(t.may_wait)?;
            // There is nothing to be patient for.
            check!(start.elapsed().as_millis() < 10_000);
            check_eq!(t.log().returned(1), 1);
            check_eq!(t.log().returned(0), 1);
            check_eq!(t.log().flushed.get(), 2);
            Ok(())
        })
    }

    #[test]
    fn all_of_the_buffer_is_posted_by_default() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, drop_it)?;
            qp.post_send(t.request(0, 123)?)?;
            qp.post_recv(t.request(0, 4097)?)?;
            check_eq!(t.fake().posted_len(qp.num(), false), 123);
            check_eq!(t.fake().posted_len(qp.num(), true), 4097);
            Ok(())
        })
    }

    #[test]
    fn a_part_of_the_buffer_is_posted_when_asked() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            for len in [0, 1, 99, 100] {
                let mut request = t.request(0, 100)?;
                request.set_len(len)?;
                qp.post_send(request)?;
                check_eq!(t.fake().posted_len(qp.num(), false), len);
                let mut request = t.request(0, 100)?;
                request.set_len(len)?;
                qp.post_recv(request)?;
                check_eq!(t.fake().posted_len(qp.num(), true), len);
            }
            Ok(())
        })
    }

    #[test]
    fn a_post_may_come_from_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(16, 16, drop_it)?;
            for place in Place::ALL {
                let (send, recv) = (t.request(1, 8)?, t.request(2, 8)?);
                let posted = place.run(|| {
                    let sent = qp.post_send(send).is_ok();
                    qp.post_recv(recv).is_ok() && sent
                });
                check_eq!((place, posted), (place, Some(true)));
            }
            check_eq!(t.fake().sends(qp.num()), 9);
            check_eq!(t.fake().recvs(qp.num()), 9);
            Ok(())
        })
    }

    #[test]
    fn a_refusal_may_come_from_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            for place in Place::ALL {
                let request = marked(t)?;
                place.run(|| check_refused(qp.post_send(request), ENOTCONN));
            }
            Ok(())
        })
    }

    #[test]
    fn a_request_may_complete_before_its_post_returns() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().echo(true);
            let qp = t.connected::<Workqueue>(1, 1, drop_it)?;
            for i in 0..40 {
                t.post_soon(0, |request| qp.post_send(request))?;
                t.post_soon(1, |request| qp.post_recv(request))?;
                check!(t.completed(2 * i + 2));
            }
            check_eq!(t.log().succeeded.get(), 80);
            Ok(())
        })
    }

    #[test]
    fn a_post_error_is_an_error() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            let post = |request| -> Result { Ok(qp.post_send(request)?) };
            check_err!(post(t.request(0, 8)?), ENOTCONN);
            Ok(())
        })
    }

    #[test]
    fn what_nobody_waits_for_comes_back_when_flushed() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().flush_when(Flush::OnDemand);
            let qp = t.connected::<Softirq>(4, 4, drop_it)?;
            for tag in 0..4 {
                qp.post_send(t.request(tag, 8)?)?;
                qp.post_recv(t.request(tag + 4, 8)?)?;
            }
            drop(qp);
            a_while();
            check_eq!(t.count(Count::LiveQp), 1);
            check_eq!(t.log().handlers_dropped.get(), 0);
            t.fake().flush_all();
            check!(eventually(|| t.log().handlers_dropped.get() == 1));
            check_eq!(t.log().flushed.get(), 8);
            Ok(())
        })
    }
}
