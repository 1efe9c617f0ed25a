// SPDX-License-Identifier: GPL-2.0

//! Queue pairs: how they are made and connected, and what is refused.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_qp)]
mod tests {
    use crate::{
        fake::{
            Count,
            Op,
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::prelude::*;
    use rdma::{
        context::{
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        qp::{
            Depths,
            QueuePair, //
        }, //
    };

    #[test]
    fn both_depths_zero_are_einval() -> Result {
        with_device(Setup::new(), |t| {
            let (pd, lease) = (t.pd()?, t.lease::<Softirq>(4, None)?);
            check_err!(t.qp_on(&pd, lease, 0, 0, drop_it), EINVAL);
            check_eq!(t.fake().calls(Op::CreateQp), 0);
            check_eq!(t.count(Count::Leased), 0);
            check_eq!(t.log().handlers_made.get(), 0);
            Ok(())
        })
    }

    #[test]
    fn one_depth_may_be_zero() -> Result {
        with_device(Setup::new(), |t| {
            check!(t.qp::<Softirq>(1, 0, drop_it).is_ok());
            check!(t.qp::<Softirq>(0, 1, drop_it).is_ok());
            check_eq!(t.fake().calls(Op::CreateQp), 2);
            Ok(())
        })
    }

    #[test]
    fn the_device_s_limit_is_the_deepest() -> Result {
        with_device(Setup::new().max_qp_wr(16), |t| {
            let pd = t.pd()?;
            for (send, recv) in [(16, 16), (16, 0), (0, 16)] {
                let lease = t.lease::<Softirq>(33, None)?;
                check!(t.qp_on(&pd, lease, send, recv, drop_it).is_ok());
            }
            Ok(())
        })
    }

    #[test]
    fn one_deeper_than_the_device_s_limit_is_einval() -> Result {
        with_device(Setup::new().max_qp_wr(16), |t| {
            let pd = t.pd()?;
            for (send, recv) in [(17, 1), (1, 17), (17, 0), (0, 17), (17, 17)] {
                let lease = t.lease::<Softirq>(100, None)?;
                check_err!(t.qp_on(&pd, lease, send, recv, drop_it), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateQp), 0);
            check_eq!(t.count(Count::Leased), 0);
            Ok(())
        })
    }

    #[test]
    fn depths_of_any_number_are_einval_at_most() -> Result {
        with_device(Setup::new().max_qp_wr(u32::MAX), |t| {
            let pd = t.pd()?;
            for (send, recv) in [
                (u32::MAX, 0),
                (0, u32::MAX),
                (u32::MAX, u32::MAX),
                (u32::MAX, 1),
                (1 << 31, 1 << 31),
                (1 << 20, 1),
            ] {
                let lease = t.lease::<Softirq>(8, None)?;
                check_err!(t.qp_on(&pd, lease, send, recv, drop_it), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateQp), 0);
            Ok(())
        })
    }

    #[test]
    fn as_much_in_flight_as_leased_is_einval() -> Result {
        with_device(Setup::new(), |t| {
            let pd = t.pd()?;
            for (send, recv) in [(8, 0), (0, 8), (9, 0), (4, 4), (8, 8)] {
                let lease = t.lease::<Softirq>(8, None)?;
                check_err!(t.qp_on(&pd, lease, send, recv, drop_it), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateQp), 0);
            check_eq!(t.count(Count::Leased), 0);
            Ok(())
        })
    }

    #[test]
    fn one_less_in_flight_than_leased_is_fine() -> Result {
        with_device(Setup::new(), |t| {
            let pd = t.pd()?;
            for (send, recv) in [(7, 0), (0, 7), (4, 3), (1, 1)] {
                let lease = t.lease::<Softirq>(8, None)?;
                check!(t.qp_on(&pd, lease, send, recv, drop_it).is_ok());
            }
            Ok(())
        })
    }

    #[test]
    fn a_failure_to_create_is_passed_on_and_gives_the_lease_back() -> Result {
        with_device(Setup::new(), |t| {
            for error in [ENOMEM, EIO, EINVAL, ENOSPC, EOPNOTSUPP, EAGAIN] {
                t.fake().fail(Op::CreateQp, error);
                check_err!(t.qp::<Softirq>(4, 4, drop_it), error);
                check_eq!(t.count(Count::Leased), 0);
                check_eq!(t.count(Count::LivePd), 0);
            }
            check_eq!(t.fake().calls(Op::DestroyQp), 0);
            check_eq!(t.log().handlers_made.get(), 0);
            Ok(())
        })
    }

    #[test]
    fn a_failure_to_initialize_is_passed_on_and_undoes_all() -> Result {
        with_device(Setup::new(), |t| {
            for error in [ENOMEM, EIO, EINVAL, ETIMEDOUT] {
                t.fake().fail(Op::ModifyInit, error);
                check_err!(t.qp::<Softirq>(4, 4, drop_it), error);
                check!(eventually(|| t.count(Count::LivePd) == 0));
                check_eq!(t.count(Count::LiveQp), 0);
                check_eq!(t.count(Count::Leased), 0);
            }
            check!(eventually(|| t.log().handlers_dropped.get() == 4));
            Ok(())
        })
    }

    #[test]
    fn a_failure_of_the_handler_is_passed_on_and_undoes_all() -> Result {
        with_device(Setup::new(), |t| {
            let (pd, lease) = (t.pd()?, t.lease::<Softirq>(5, None)?);
            let qp = QueuePair::<Probe<'_, Softirq>>::new(
                &pd,
                lease,
                t.dev.port(1)?,
                Depths { send: 2, recv: 2 },
                Err::<Probe<'_, Softirq>, Error>(EXDEV),
                t.may_sleep(),
            );
            check_err!(qp, EXDEV);
            check_eq!(t.count(Count::LiveQp), 0);
            check_eq!(t.count(Count::Leased), 0);
            check_eq!(t.fake().calls(Op::DestroyQp), 1);
            Ok(())
        })
    }

    #[test]
    fn numbers_differ() -> Result {
        with_device(Setup::new(), |t| {
            let a = t.qp::<Softirq>(1, 1, drop_it)?;
            let b = t.qp::<Softirq>(1, 1, drop_it)?;
            check!(a.num() != b.num());
            Ok(())
        })
    }

    #[test]
    fn every_context_serves() -> Result {
        with_device(Setup::new(), |t| {
            check!(t.connected::<Softirq>(1, 1, drop_it).is_ok());
            check!(t.connected::<Workqueue>(1, 1, drop_it).is_ok());
            check!(t.connected::<UnboundWorkqueue>(1, 1, drop_it).is_ok());
            Ok(())
        })
    }

    #[test]
    fn the_second_port_serves() -> Result {
        with_device(Setup::new().ports(2), |t| {
            let (pd, lease) = (t.pd()?, t.lease::<Softirq>(3, None)?);
            let qp = QueuePair::new(
                &pd,
                lease,
                t.dev.port(2)?,
                Depths { send: 1, recv: 1 },
                Probe::new(&t.env, None, drop_it),
                t.may_sleep(),
            )?;
            t.connect(&qp)
        })
    }

    #[test]
    fn a_failure_to_make_ready_is_passed_on_and_can_be_tried_again() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            for error in [EIO, ENOMEM, EINVAL, ETIMEDOUT] {
                t.fake().fail(Op::ModifyRtr, error);
                check_err!(t.connect(&qp), error);
                check_err!(qp.post_send(t.request(0, 8)?), ENOTCONN);
            }
            t.connect(&qp)?;
            check!(qp.post_send(t.request(0, 8)?).is_ok());
            Ok(())
        })
    }

    #[test]
    fn a_failure_to_start_sending_is_passed_on_and_nothing_is_sent() -> Result {
        with_device(Setup::new(), |t| {
            for error in [EIO, ENOMEM, EINVAL, ETIMEDOUT] {
                let qp = t.qp::<Softirq>(1, 1, drop_it)?;
                t.fake().fail(Op::ModifyRts, error);
                check_err!(t.connect(&qp), error);
                check_err!(qp.post_send(t.request(0, 8)?), ENOTCONN);
            }
            check_eq!(t.fake().calls(Op::PostSend), 0);
            Ok(())
        })
    }

    #[test]
    fn connecting_twice_is_einval_and_does_no_harm() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(1, 1, drop_it)?;
            check_err!(t.connect(&qp), EINVAL);
            check!(qp.post_send(t.request(0, 8)?).is_ok());
            Ok(())
        })
    }

    #[test]
    fn connecting_after_the_end_fails_and_opens_nothing() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            qp.end(t.may_sleep())?;
            check!(t.connect(&qp).is_err());
            check_err!(qp.post_send(t.request(0, 8)?), ESHUTDOWN);
            check_err!(qp.post_recv(t.request(0, 8)?), ESHUTDOWN);
            Ok(())
        })
    }

    #[test]
    fn an_iwarp_port_is_eopnotsupp() -> Result {
        with_device(Setup::new().iwarp(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            let peer = qp.endpoint(0, t.may_sleep())?;
            check_err!(qp.connect(&peer, 0, t.may_sleep()), EOPNOTSUPP);
            check_eq!(t.fake().calls(Op::ModifyRtr), 0);
            Ok(())
        })
    }

    #[test]
    fn a_port_that_cannot_be_queried_stops_connecting() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            let peer = qp.endpoint(0, t.may_sleep())?;
            t.fake().fail(Op::QueryPort, EIO);
            check_err!(qp.connect(&peer, 0, t.may_sleep()), EIO);
            check_eq!(t.fake().calls(Op::ModifyRtr), 0);
            check!(qp.connect(&peer, 0, t.may_sleep()).is_ok());
            Ok(())
        })
    }

    #[test]
    fn an_endpoint_needs_an_address_and_a_port() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            check!(qp.endpoint(1, t.may_sleep()).is_ok());
            check_err!(qp.endpoint(2, t.may_sleep()), ENOENT);
            check_err!(qp.endpoint(3, t.may_sleep()), EINVAL);
            check_err!(qp.endpoint(u8::MAX, t.may_sleep()), EINVAL);
            t.fake().fail(Op::QueryPort, ENODEV);
            check_err!(qp.endpoint(0, t.may_sleep()), ENODEV);
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_making_one_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            let pd = t.pd()?;
            for place in Place::ATOMIC {
                let lease = t.lease::<Softirq>(3, None)?;
                let error = place.run_here(|| t.qp_on(&pd, lease, 1, 1, drop_it).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            check_eq!(t.fake().calls(Op::CreateQp), 0);
            check!(eventually(|| t.count(Count::Leased) == 0));
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_connecting_and_ending_are_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            let peer = qp.endpoint(0, t.may_sleep())?;
            for place in Place::ATOMIC {
                let errors = place.run_here(|| {
                    (
                        qp.endpoint(0, t.may_sleep()).err(),
                        qp.connect(&peer, 0, t.may_sleep()).err(),
                        qp.end(t.may_sleep()).err(),
                    )
                });
                let expected = (Some(EDEADLK), Some(EDEADLK), Some(EDEADLK));
                check_eq!((place, errors), (place, Some(expected)));
            }
            check_eq!(t.fake().calls(Op::ModifyRtr), 0);
            check_eq!(t.fake().calls(Op::ModifyErr), 0);
            // It wasn't ended: it can be connected.
            t.connect(&qp)
        })
    }

    #[test]
    fn where_nobody_may_sleep_closing_is_edeadlk_and_drops() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let qp = t.connected::<Softirq>(1, 1, drop_it)?;
                qp.post_recv(t.request(0, 8)?)?;
                let error = place.run_here(|| qp.close(t.may_wait).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
                check!(eventually(|| t.count(Count::LiveQp) == 0));
            }
            check!(eventually(|| t.log().flushed.get() == 5));
            Ok(())
        })
    }

    #[test]
    fn closing_waits_until_all_is_gone() -> Result {
        with_device(Setup::new(), |t| {
            for i in 1..=20 {
                let qp = t.connected::<Softirq>(4, 4, drop_it)?;
                for tag in 0..4 {
                    qp.post_send(t.request(tag, 8)?)?;
                    qp.post_recv(t.request(tag, 8)?)?;
                }
                qp.close(t.may_wait)?;
                check_eq!(t.count(Count::LiveQp), 0);
                check_eq!(t.count(Count::LivePd), 0);
                check_eq!(t.count(Count::Leased), 0);
                check_eq!(t.log().handlers_dropped.get(), i);
                check_eq!(t.log().completed(), i * 8);
                check_eq!(t.log().tags_dropped.get(), i * 8);
            }
            Ok(())
        })
    }

    #[test]
    fn each_is_destroyed_once() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                for _ in 0..10 {
                    drop(t.qp::<Softirq>(1, 1, drop_it)?);
                    t.connected::<Workqueue>(1, 1, drop_it)?.close(t.may_wait)?;
                    let qp = t.qp::<UnboundWorkqueue>(1, 1, drop_it)?;
                    t.keep(qp)?;
                }
                Ok(())
            },
            |env| {
                check_eq!(env.fake.calls(Op::CreateQp), 30);
                check_eq!(env.fake.calls(Op::DestroyQp), 30);
                check_eq!(env.fake.calls(Op::DeallocPd), 30);
                Ok(())
            },
        )
    }

    #[test]
    fn a_protection_domain_lives_as_long_as_its_last_queue_pair() -> Result {
        with_device(Setup::new(), |t| {
            let pd = t.pd()?;
            let lease = t.lease::<Softirq>(3, None)?;
            let a = t.qp_on(&pd, lease, 1, 1, drop_it)?;
            let lease = t.lease::<Softirq>(3, None)?;
            let b = t.qp_on(&pd, lease, 1, 1, drop_it)?;
            drop(pd);
            a.close(t.may_wait)?;
            check_eq!(t.count(Count::LivePd), 1);
            t.connect(&b)?;
            b.post_send(t.request(0, 8)?)?;
            b.close(t.may_wait)?;
            check_eq!(t.count(Count::LivePd), 0);
            Ok(())
        })
    }

    #[test]
    fn errors_of_a_protection_domain_are_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            for error in [ENOMEM, EIO, ENOSPC, EINVAL] {
                t.fake().fail(Op::AllocPd, error);
                check_err!(t.pd(), error);
            }
            for place in Place::ATOMIC {
                let error = place.run_here(|| t.pd().err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            check_eq!(t.fake().calls(Op::AllocPd), 4);
            check_eq!(t.count(Count::LivePd), 0);
            Ok(())
        })
    }

    #[test]
    fn a_protection_domain_dropped_anywhere_is_gone_soon() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ALL {
                let pd = t.pd()?;
                let second = pd.clone();
                place.run(move || drop(pd));
                check_eq!(t.count(Count::LivePd), 1);
                place.run(move || drop(second));
                check!(eventually(|| t.count(Count::LivePd) == 0));
            }
            check_eq!(t.fake().calls(Op::DeallocPd), 9);
            Ok(())
        })
    }

    #[test]
    fn the_handler_and_the_device_can_be_reached() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            check!(kernel::sync::Arc::ptr_eq(&qp.handler().env, &t.env));
            check!(core::ptr::eq(qp.device(), t.dev));
            Ok(())
        })
    }
}
