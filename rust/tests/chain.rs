// SPDX-License-Identifier: GPL-2.0

//! Chains: several requests, one call of the driver.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_chain)]
mod tests {
    use crate::{
        fake::{
            Count,
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
            Workqueue, //
        },
        qp::Chain, //
    };

    /// The tags of the requests in a chain, the last first.
    fn tags<const N: usize>(mut chain: Chain<'_, Tag, N>) -> Result<KVec<u32>> {
        let mut tags = KVec::new();
        while let Some(request) = chain.pop() {
            tags.push(request.tag().id, GFP_KERNEL)?;
        }
        Ok(tags)
    }

    #[test]
    fn a_chain_takes_as_many_as_it_is_long() -> Result {
        with_device(Setup::new(), |t| {
            let mut chain = t.requests::<4>(0..4)?;
            check!(chain.is_full() && chain.len() == 4);
            let refused = chain.push(t.request(4, 8)?).err();
            check_eq!(refused.map(|request| request.tag().id), Some(4));
            check_eq!(chain.pop().map(|request| request.tag().id), Some(3));
            check_eq!(chain.len(), 3);
            drop(chain);
            check_eq!(t.log().tags_dropped.get(), 5);
            Ok(())
        })
    }

    fn posted<C: Poolable>(t: &mut Test<'_>) -> Result {
        let qp = t.connected::<C>(8, 8, drop_it)?;
        let mut sends = t.requests::<8>(0..8)?;
        let mut recvs = t.requests::<8>(8..16)?;
        qp.post_sends(&mut sends)?;
        qp.post_recvs(&mut recvs)?;
        check!(sends.is_empty() && recvs.is_empty());
        check_eq!(t.fake().sends(qp.num()), 8);
        check_eq!(t.fake().recvs(qp.num()), 8);
        for tag in 0..8 {
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
            check!(t.completed(2 * tag + 1));
            check_eq!(t.log().last_tag.get(), tag);
            t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            check!(t.completed(2 * tag + 2));
            check_eq!(t.log().last_tag.get(), 8 + tag);
        }
        // There is room again.
        qp.post_sends(&mut t.requests::<8>(0..8)?)
    }

    #[test]
    fn all_of_a_chain_is_posted_in_order_in_softirq() -> Result {
        with_device(Setup::new(), posted::<Softirq>)
    }

    #[test]
    fn all_of_a_chain_is_posted_in_order_in_a_worker() -> Result {
        with_device(Setup::new(), posted::<Workqueue>)
    }

    #[test]
    fn an_empty_chain_is_nothing() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(1, 1, drop_it)?;
            // Not even an error, though it isn't connected.
            qp.post_sends(&mut Chain::<_, 16>::new())?;
            qp.post_recvs(&mut Chain::<_, 1>::new())?;
            check_eq!(
                t.fake().calls(Op::PostSend) + t.fake().calls(Op::PostRecv),
                0
            );
            Ok(())
        })
    }

    #[test]
    fn a_chain_that_has_no_room_stays_whole() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(6, 6, drop_it)?;
            qp.post_sends(&mut t.requests::<4>(0..4)?)?;
            let mut more = t.requests::<4>(10..13)?;
            check_eq!(qp.post_sends(&mut more), Err(ENOMEM));
            check_eq!(more.len(), 3);
            drop(more.pop());
            qp.post_sends(&mut more)?;
            check!(more.is_empty());
            check_eq!(t.fake().sends(qp.num()), 6);
            check_eq!(qp.post_sends(&mut t.requests::<1>(0..1)?), Err(ENOMEM));
            qp.post_recvs(&mut t.requests::<8>(0..6)?)?;
            check_eq!(qp.post_recvs(&mut t.requests::<8>(0..1)?), Err(ENOMEM));
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }

    #[test]
    fn a_chain_before_connecting_and_after_a_failure_stays_whole() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.qp::<Softirq>(8, 8, drop_it)?;
            let mut sends = t.requests::<4>(0..4)?;
            check_eq!(qp.post_sends(&mut sends), Err(ENOTCONN));
            t.connect(&qp)?;
            qp.post_recvs(&mut t.requests::<4>(20..21)?)?;
            t.fake().complete_recv(qp.num(), Wc::failed(4))?;
            check!(t.completed(1));
            check_eq!(qp.post_sends(&mut sends), Err(ESHUTDOWN));
            check_eq!(tags(sends)?.as_slice(), [3, 2, 1, 0].as_slice());
            Ok(())
        })
    }

    #[test]
    fn from_the_one_that_the_driver_names_they_stay() -> Result {
        with_device(Setup::new(), |t| {
            for taken in 0..8u32 {
                let qp = t.connected::<Softirq>(8, 8, drop_it)?;
                t.fake().fail_after(Op::PostSend, taken, 1, EIO);
                t.fake().fail_after(Op::PostRecv, taken, 1, EAGAIN);
                let (mut sends, mut recvs) = (t.requests::<8>(0..8)?, t.requests::<8>(0..8)?);
                check_eq!(qp.post_sends(&mut sends), Err(EIO));
                check_eq!(qp.post_recvs(&mut recvs), Err(EAGAIN));
                check_eq!(t.fake().sends(qp.num()), taken);
                check_eq!(t.fake().recvs(qp.num()), taken);
                for chain in [sends, recvs] {
                    check_eq!(chain.len(), 8 - taken as usize);
                    let left = tags(chain)?;
                    check!(left.into_iter().eq((taken..8).rev()));
                }
                // They took no room.
                qp.post_sends(&mut t.requests::<8>(0..8 - taken)?)?;
                qp.post_recvs(&mut t.requests::<8>(0..8 - taken)?)?;
                qp.close(t.may_wait)?;
            }
            check_eq!(t.log().flushed.get(), 8 * 16);
            Ok(())
        })
    }

    #[test]
    fn what_the_driver_is_silent_about_comes_back_once() -> Result {
        with_device(Setup::new(), |t| silent(t, Refusal::Unnamed))?;
        with_device(Setup::new(), |t| silent(t, Refusal::Taken))
    }

    fn silent(t: &mut Test<'_>, refusal: Refusal) -> Result {
        t.fake().refuse(refusal);
        t.fake().fail_after(Op::PostSend, 3, 1, EIO);
        let qp = t.connected::<Softirq>(8, 8, drop_it)?;
        let mut sends = t.requests::<8>(0..8)?;
        check_eq!(qp.post_sends(&mut sends), Err(EIO));
        check!(sends.is_empty());
        check_eq!(qp.post_recvs(&mut t.requests::<8>(0..1)?), Err(ESHUTDOWN));
        qp.close(t.may_wait)?;
        for tag in 0..8 {
            check_eq!((tag, t.log().returned(tag)), (tag, 1));
        }
        Ok(())
    }

    #[test]
    fn a_chain_may_be_posted_anywhere_and_in_a_handler() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(32, 32, |call, request| {
                let mut chain = Chain::<_, 2>::new();
                let _ = chain.push(request);
                // Refused at the end.
                if call.recv {
                    let _ = call.qp.post_recvs(&mut chain);
                } else {
                    let _ = call.qp.post_sends(&mut chain);
                }
            })?;
            for place in Place::ALL {
                let mut sends = t.requests::<2>(0..2)?;
                let posted = place.run(|| qp.post_sends(&mut sends));
                check_eq!((place, posted), (place, Some(Ok(()))));
            }
            qp.post_recvs(&mut t.requests::<16>(2..10)?)?;
            for i in 0..20 {
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(t.completed(2 * i + 1));
                t.fake().complete_send(qp.num(), Wc::ok(8))?;
                check!(t.completed(2 * i + 2));
                check!(eventually(|| t.fake().sends(qp.num()) == 18));
                check!(eventually(|| t.fake().recvs(qp.num()) == 8));
            }
            Ok(())
        })
    }
}
