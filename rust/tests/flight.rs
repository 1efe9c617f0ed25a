// SPDX-License-Identifier: GPL-2.0

//! What the device forgets comes back all the same.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_flight)]
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
        new_spinlock_irq,
        prelude::*,
        sync::{
            Arc,
            SpinLockIrq, //
        }, //
    };
    use rdma::{
        completion::Completion,
        context::{
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        qp::{
            Depths,
            Handler,
            Poster,
            QueuePair, //
        },
        request::WorkRequest, //
    };

    /// Eight sends, of which the device completes three and forgets the rest, and eight receives.
    fn forgetful<C: Poolable>(t: &mut Test<'_>) -> Result {
        let _impatient = Impatient::new();
        t.fake().flush_when(Flush::Receives);
        let qp = t.connected::<C>(8, 8, drop_it)?;
        for tag in 0..8 {
            qp.post_send(t.request(tag, 8)?)?;
            qp.post_recv(t.request(8 + tag, 8)?)?;
        }
        for _ in 0..3 {
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
        }
        check!(t.completed(3));
        qp.close(t.may_wait)?;
        for tag in 0..16 {
            check_eq!((tag, t.log().returned(tag)), (tag, 1));
        }
        check_eq!(t.log().succeeded.get(), 3);
        check_eq!(t.log().flushed.get(), 13);
        check_eq!(t.log().handlers_dropped.get(), 1);
        Ok(())
    }

    #[test]
    fn forgotten_sends_come_back_in_softirq() -> Result {
        with_device(Setup::new(), forgetful::<Softirq>)
    }

    #[test]
    fn forgotten_sends_come_back_in_a_worker() -> Result {
        with_device(Setup::new(), forgetful::<Workqueue>)
    }

    #[test]
    fn forgotten_sends_come_back_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), forgetful::<UnboundWorkqueue>)
    }

    #[test]
    fn forgotten_sends_of_what_is_dropped_anywhere_come_back() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            for (i, place) in (1..).zip(Place::ALL) {
                let qp = t.connected::<Softirq>(1, 1, post_again)?;
                qp.post_send(t.request(0, 8)?)?;
                place.run(move || drop(qp));
                check!(eventually(|| t.log().handlers_dropped.get() == i));
                check_eq!(t.log().returned(0), i);
            }
            Ok(())
        })
    }

    #[test]
    fn what_was_reposted_many_times_comes_back_once() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            let qp = t.connected::<Softirq>(2, 1, post_again)?;
            qp.post_send(t.request(0, 8)?)?;
            qp.post_send(t.request(1, 8)?)?;
            for i in 1..=20 {
                check!(eventually(|| t
                    .fake()
                    .complete_send(qp.num(), Wc::ok(8))
                    .is_ok()));
                check!(t.completed(i));
            }
            qp.close(t.may_wait)?;
            check_eq!(t.log().flushed.get(), 2);
            check_eq!(t.log().returned(0) + t.log().returned(1), 22);
            Ok(())
        })
    }

    #[test]
    fn what_cannot_be_brought_back_is_kept() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            let qp = t.connected::<Softirq>(1, 1, drop_it)?;
            let (send, recv) = (t.request(1, 8)?, t.request(2, 8)?);
            crate::fake::known_leak(qp.handler());
            crate::fake::known_leak(send.tag());
            t.log().handlers_leaked.add();
            t.log().tags_leaked.add();
            qp.post_send(send)?;
            qp.post_recv(recv)?;
            // The queue pair by which it would be.
            t.fake().fail(Op::CreateQp, ENOMEM);
            qp.close(t.may_wait)?;
            check_eq!(t.log().returned(1), 0);
            check_eq!(t.log().returned(2), 1);
            check_eq!(t.count(Count::LiveQp), 0);
            check_eq!(t.count(Count::Leased), 0);
            Ok(())
        })
    }

    #[test]
    fn what_was_never_taken_comes_back_from_either_side() -> Result {
        with_device(Setup::new(), |t| {
            for recv in [false, true] {
                let qp = t.connected::<Workqueue>(2, 2, drop_it)?;
                t.fake().refuse(Refusal::Unnamed);
                let op = if recv { Op::PostRecv } else { Op::PostSend };
                t.fake().fail(op, EIO);
                let request = t.request(3, 8)?;
                let posted = if recv {
                    qp.post_recv(request)
                } else {
                    qp.post_send(request)
                };
                check!(posted.is_err_and(|e| e.request.is_none()));
                qp.close(t.may_wait)?;
                check_eq!(t.log().returned(3), 1 + u32::from(recv));
            }
            Ok(())
        })
    }

    type Shelf<'bound> = SpinLockIrq<KVec<WorkRequest<'bound, Tag>>>;

    /// Lays by what comes back.
    struct LayBy<'bound> {
        shelf: Arc<Shelf<'bound>>,
        /// Makes the queue pair so large that it gets pages of its own. These the kernel hands out again as
        /// soon as they are freed. What is smaller KASAN holds back.
        _large: [u8; 16384],
    }

    impl<'bound> Handler<'bound> for LayBy<'bound> {
        type Context = Softirq;
        type Tag = Tag;

        fn sent(
            &self,
            _: &Poster<'_, 'bound, Self>,
            request: WorkRequest<'bound, Tag>,
            _: &Completion<'_>,
            _: Softirq,
        ) {
            // There is room: see `shelf`.
            let _ = self.shelf.lock().push(request, GFP_ATOMIC);
        }

        fn received(
            &self,
            qp: &Poster<'_, 'bound, Self>,
            request: WorkRequest<'bound, Tag>,
            completion: &Completion<'_>,
            context: Softirq,
        ) {
            self.sent(qp, request, completion, context);
        }
    }

    fn shelf<'bound>() -> Result<Arc<Shelf<'bound>>> {
        let room = KVec::with_capacity(4, GFP_KERNEL)?;
        Arc::pin_init(new_spinlock_irq!(room, "rdma_kunit::Shelf"), GFP_KERNEL)
    }

    fn lay_by<'bound>(
        t: &Test<'bound>,
        shelf: &Arc<Shelf<'bound>>,
    ) -> Result<QueuePair<'bound, LayBy<'bound>>> {
        let depths = Depths { send: 1, recv: 4 };
        let qp = QueuePair::new(
            &t.pd()?,
            t.lease(depths.total(), None)?,
            t.dev.port(1)?,
            depths,
            init!(LayBy {
                shelf: shelf.clone(),
                _large <- pin_init::init_zeroed(),
            }),
            t.may_sleep(),
        )?;
        t.connect(&qp)?;
        Ok(qp)
    }

    #[test]
    fn what_a_queue_pair_had_that_was_at_the_same_place_comes_back() -> Result {
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            t.fake().flush_when(Flush::Receives);
            let shelf = shelf()?;
            let qp = lay_by(t, &shelf)?;
            let place = core::ptr::from_ref(qp.handler()).addr();
            qp.post_send(t.request(0, 8)?)?;
            t.fake().complete_send(qp.num(), Wc::ok(8))?;
            check!(eventually(|| shelf.lock().len() == 1));
            qp.close(t.may_wait)?;
            let mut others = KVec::new();
            let qp = loop {
                let qp = lay_by(t, &shelf)?;
                if core::ptr::from_ref(qp.handler()).addr() == place {
                    break qp;
                }
                others.push(qp, GFP_KERNEL)?;
                check!(others.len() < 64);
            };
            let request = { shelf.lock().pop() }.ok_or(ENOENT)?;
            qp.post_send(request)?;
            // The device forgets it.
            qp.close(t.may_wait)?;
            check_eq!(shelf.lock().len(), 1);
            Ok(())
        })
    }

    #[test]
    fn requests_can_be_handed_out_of_the_handler() -> Result {
        with_device(Setup::new(), |t| {
            let shelf = shelf()?;
            let qp = lay_by(t, &shelf)?;
            for tag in 0..4 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            for _ in 0..4 {
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
            }
            check!(eventually(|| shelf.lock().len() == 4));
            check_eq!(t.log().tags_dropped.get(), 0);
            while let Some(request) = { shelf.lock().pop() } {
                t.post_soon_with(request, |request| qp.post_recv(request))?;
            }
            check_eq!(t.fake().recvs(qp.num()), 4);
            qp.close(t.may_wait)?;
            // Flushed, and laid by again.
            check_eq!(shelf.lock().len(), 4);
            Ok(())
        })
    }

    #[test]
    fn a_request_may_outlive_its_queue_pair() -> Result {
        with_device(Setup::new(), |t| {
            let shelf = shelf()?;
            let qp = lay_by(t, &shelf)?;
            for tag in 0..4 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            qp.close(t.may_wait)?;
            let requests = core::mem::take(&mut *shelf.lock());
            check_eq!(requests.len(), 4);
            // On a second one, which goes as well, and then nowhere.
            let qp = lay_by(t, &shelf)?;
            *shelf.lock() = KVec::with_capacity(4, GFP_KERNEL)?;
            for (i, request) in requests.into_iter().enumerate() {
                if i % 2 == 0 {
                    qp.post_recv(request)?;
                } else {
                    drop(request.into_parts());
                }
            }
            qp.close(t.may_wait)?;
            check_eq!(shelf.lock().len(), 2);
            check_eq!(t.log().tags_dropped.get(), 2);
            let requests = core::mem::take(&mut *shelf.lock());
            drop(requests);
            check_eq!(t.log().tags_dropped.get(), 4);
            Ok(())
        })
    }

    #[test]
    fn requests_come_and_go_while_others_stay_in_flight() -> Result {
        with_device(Setup::new(), |t| {
            let shelf = shelf()?;
            let qp = lay_by(t, &shelf)?;
            for tag in 0..4 {
                qp.post_recv(t.request(tag, 8)?)?;
            }
            for i in 0..40 {
                t.fake().complete_recv(qp.num(), Wc::ok(8))?;
                check!(eventually(|| shelf.lock().len() == 1));
                let request = shelf.lock().pop().ok_or(EIO)?;
                let request = match i % 3 {
                    0 => request,
                    1 => t.request(0, 8)?,
                    _ => {
                        let (buffer, tag) = request.into_parts();
                        WorkRequest::new(buffer, tag, GFP_KERNEL)?
                    }
                };
                qp.post_recv(request)?;
            }
            qp.close(t.may_wait)?;
            check_eq!(shelf.lock().len(), 4);
            let requests = core::mem::take(&mut *shelf.lock());
            drop(requests);
            Ok(())
        })
    }
}
