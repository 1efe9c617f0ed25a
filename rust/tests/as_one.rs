// SPDX-License-Identifier: GPL-2.0

//! Sends that are posted as one, of which the last speaks for all.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_as_one)]
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
        prelude::*,
        sync::Arc,
        time::{
            Instant,
            Monotonic, //
        }, //
    };
    use rdma::{
        completion::Completion,
        context::{
            Direct,
            PollContext,
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        cq::{
            CompletionQueue,
            Entries, //
        },
        poll::PollSlot,
        qp::{
            Chain,
            ChainHandler,
            Depths,
            Handler,
            Poster,
            QueuePair, //
        },
        request::WorkRequest, //
    };

    /// Far less than teardown waits for what doesn't come back.
    const SOON_MS: i64 = 3_000;

    /// Writes down what comes back, alone in `a` and as one in `b`. Posts again what succeeded, if it is to.
    struct Rows<C> {
        env: Arc<Env>,
        again: bool,
        _context: core::marker::PhantomData<C>,
    }

    impl<C: PollContext> Rows<C> {
        fn note(&self, request: &WorkRequest<'_, Tag>) {
            if let Some(returned) = self.env.log.returned.get(request.tag().id as usize) {
                returned.add();
            }
        }
    }

    impl<'bound, C: PollContext> Handler<'bound> for Rows<C> {
        type Context = C;
        type Tag = Tag;

        fn sent(
            &self,
            _: &Poster<'_, 'bound, Self>,
            request: WorkRequest<'bound, Tag>,
            completion: &Completion<'_>,
            _: C,
        ) {
            let log = &self.env.log;
            self.note(&request);
            match completion.result() {
                Ok(_) => log.succeeded.add(),
                Err(failure) if failure.is_flush() => log.flushed.add(),
                Err(_) => log.failed.add(),
            };
            log.a.add();
            drop(request);
            log.sent.add();
        }
    }

    impl<'bound, C: PollContext> ChainHandler<'bound> for Rows<C> {
        fn sent_as_one(
            &self,
            qp: &Poster<'_, 'bound, Self>,
            mut chain: Chain<'bound, Tag>,
            completion: &Completion<'_>,
            _: C,
        ) {
            let log = &self.env.log;
            let mut before = None;
            for request in chain.iter_mut() {
                self.note(request);
                // In the order in which they were posted.
                if before.replace(request.tag().id) >= Some(request.tag().id) {
                    log.misplaced.add();
                }
            }
            if completion.result().is_err() {
                log.misplaced.add();
            }
            let number = chain.len();
            // Refused only when the queue pair goes.
            if self.again && qp.post_sends_as_one(&mut chain).is_ok() && !chain.is_empty() {
                log.misplaced.add();
            }
            drop(chain);
            log.b.add();
            for _ in 0..number {
                log.succeeded.add();
                log.sent.add();
            }
        }
    }

    fn rows_on<'bound, C: PollContext>(
        t: &Test<'bound>,
        cq: impl Into<Entries<'bound, C>>,
        depths: Depths,
        again: bool,
    ) -> Result<QueuePair<'bound, Rows<C>>> {
        let rows = Rows {
            env: t.env.clone(),
            again,
            _context: core::marker::PhantomData,
        };
        let handler = Ok::<_, Error>(rows);
        let qp = QueuePair::new(&t.pd()?, cq, t.dev.port(1)?, depths, handler, t.may_sleep())?;
        t.connect(&qp)?;
        Ok(qp)
    }

    /// A queue pair for so many sends, and twice as many receives.
    fn rows<'bound, C: Poolable>(
        t: &Test<'bound>,
        send: u32,
        again: bool,
    ) -> Result<QueuePair<'bound, Rows<C>>> {
        let depths = Depths {
            send,
            recv: 2 * send,
        };
        rows_on(t, t.lease(depths.total(), None)?, depths, again)
    }

    fn complete(t: &Test<'_>, qp: u32, number: u32) -> Result {
        for _ in 0..number {
            t.fake().complete_send(qp, Wc::ok(8))?;
        }
        Ok(())
    }

    /// Closes a queue pair, which mustn't take as long as waiting for what doesn't come back.
    fn close_soon<'bound, H: Handler<'bound>>(t: &Test<'_>, qp: QueuePair<'bound, H>) -> Result {
        let start = Instant::<Monotonic>::now();
        qp.close(t.may_wait)?;
        let millis = start.elapsed().as_millis();
        check!((0..SOON_MS).contains(&millis));
        Ok(())
    }

    /// Each of so many requests came back once.
    fn each_returned(t: &Test<'_>, number: u32) -> Result {
        for tag in 0..number {
            check_eq!((tag, t.log().returned(tag)), (tag, 1));
        }
        check_eq!(t.log().misplaced.get(), 0);
        Ok(())
    }

    fn the_last_speaks<C: Poolable>(t: &mut Test<'_>) -> Result {
        for length in 1..=16 {
            let qp = rows::<C>(t, length, false)?;
            let (calls, back) = (t.log().b.get(), t.log().sent.get());
            qp.post_sends_as_one(&mut t.requests::<16>(0..length)?)?;
            complete(t, qp.num(), length - 1)?;
            a_while();
            check_eq!(t.log().sent.get(), back);
            check_eq!(t.count(Count::Queued), 0);
            complete(t, qp.num(), 1)?;
            check!(t.completed(back + length));
            check_eq!(t.log().b.get(), calls + 1);
            // There is room for all again, as soon as the handler has returned.
            let mut more = t.requests::<16>(0..length)?;
            check!(eventually(|| qp.post_sends_as_one(&mut more).is_ok()));
            check!(qp.post_send(t.request(0, 8)?).is_err());
            complete(t, qp.num(), length)?;
            check!(t.completed(back + 2 * length));
            qp.close(t.may_wait)?;
        }
        check_eq!(t.log().a.get(), 0);
        check_eq!(t.log().misplaced.get(), 0);
        check_eq!(t.count(Count::BadPosts), 0);
        Ok(())
    }

    #[test]
    fn the_last_speaks_for_all_in_softirq() -> Result {
        with_device(Setup::new(), the_last_speaks::<Softirq>)
    }

    #[test]
    fn the_last_speaks_for_all_in_a_worker() -> Result {
        with_device(Setup::new(), the_last_speaks::<Workqueue>)
    }

    #[test]
    fn the_last_speaks_for_all_in_an_unbound_worker() -> Result {
        with_device(Setup::new(), the_last_speaks::<UnboundWorkqueue>)
    }

    #[test]
    fn they_are_posted_again_in_their_own_places() -> Result {
        with_device(Setup::new(), |t| {
            let qp = rows::<Softirq>(t, 8, true)?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..5)?)?;
            qp.post_sends_as_one(&mut t.requests::<16>(5..8)?)?;
            for round in 1..=20 {
                complete(t, qp.num(), 8)?;
                check!(t.completed(8 * round));
                check!(eventually(|| t.fake().sends(qp.num()) == 8));
                // Nobody else can have them.
                check!(qp.post_send(t.request(0, 8)?).is_err());
            }
            close_soon(t, qp)?;
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, 21));
            }
            check_eq!(t.log().flushed.get(), 8);
            check_eq!(t.log().misplaced.get(), 0);
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }

    #[test]
    fn a_handler_may_post_each_of_them_alone() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Workqueue>(8, 8, |call, request| {
                // Each in the place of one of them.
                if call.repost(request).is_err() {
                    call.log().c.add();
                }
            })?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..8)?)?;
            complete(t, qp.num(), 8)?;
            check!(t.completed(8));
            each_returned(t, 8)?;
            check_eq!(t.log().last_tag.get(), 7);
            check_eq!(t.log().c.get(), 0);
            check_eq!(t.fake().sends(qp.num()), 8);
            // They are posted alone now.
            complete(t, qp.num(), 1)?;
            check!(t.completed(9));
            close_soon(t, qp)?;
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }

    #[test]
    fn a_handler_may_post_fewer_or_more_than_came_back() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(12, 1, |call, request| {
                // The first of each chain is dropped, the others are posted again, two of them as one.
                match request.tag().id % 4 {
                    0 => drop(request),
                    1 => drop(call.repost(request)),
                    _ => {
                        let mut chain = Chain::<_, 2>::new();
                        let _ = chain.push(request);
                        let _ = call.qp.post_sends_as_one(&mut chain);
                    }
                }
            })?;
            for (i, left) in (0..).zip([3, 6, 9]) {
                qp.post_sends_as_one(&mut t.requests::<16>(4 * i..4 * i + 4)?)?;
                // Those that were posted before are in front.
                complete(t, qp.num(), t.fake().sends(qp.num()))?;
                check!(eventually(|| t.fake().sends(qp.num()) == left));
            }
            close_soon(t, qp)?;
            check_eq!(t.log().tags_dropped.get(), 12);
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }

    #[test]
    fn one_that_fails_ends_it_and_all_come_back_once() -> Result {
        with_device(Setup::new(), |t| fails_at(t, 0))?;
        with_device(Setup::new(), |t| fails_at(t, 1))?;
        with_device(Setup::new(), |t| fails_at(t, 2))?;
        with_device(Setup::new(), |t| fails_at(t, 3))
    }

    fn fails_at(t: &mut Test<'_>, failing: u32) -> Result {
        let qp = rows::<Softirq>(t, 8, false)?;
        qp.post_sends_as_one(&mut t.requests::<16>(0..4)?)?;
        qp.post_sends_as_one(&mut t.requests::<16>(4..8)?)?;
        qp.post_recv(t.request(8, 8)?)?;
        complete(t, qp.num(), failing)?;
        t.fake().complete_send(qp.num(), Wc::failed(10))?;
        check!(t.completed(1));
        check!(qp.post_sends_as_one(&mut t.requests::<16>(9..10)?) == Err(ESHUTDOWN));
        close_soon(t, qp)?;
        each_returned(t, 8)?;
        check_eq!(t.log().failed.get(), 1);
        check_eq!(t.log().flushed.get(), 7);
        check_eq!(t.log().b.get(), 0);
        check_eq!(t.count(Count::LiveQp), 0);
        check_eq!(t.count(Count::Leased), 0);
        Ok(())
    }

    #[test]
    fn closed_in_the_middle_all_come_back_once() -> Result {
        with_device(Setup::new(), |t| {
            closed_in_the_middle::<Softirq>(t, Flush::AtOnce)
        })?;
        with_device(Setup::new(), |t| {
            closed_in_the_middle::<Workqueue>(t, Flush::AtOnce)
        })?;
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            closed_in_the_middle::<UnboundWorkqueue>(t, Flush::OnDestroy)
        })?;
        with_device(Setup::new(), |t| {
            let _impatient = Impatient::new();
            closed_in_the_middle::<Softirq>(t, Flush::Receives)
        })
    }

    fn closed_in_the_middle<C: Poolable>(t: &mut Test<'_>, flush: Flush) -> Result {
        t.fake().flush_when(flush);
        for (i, done) in (1..).zip([0, 2, 4, 7, 8]) {
            let qp = rows::<C>(t, 8, false)?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..4)?)?;
            qp.post_sends_as_one(&mut t.requests::<16>(4..8)?)?;
            complete(t, qp.num(), done)?;
            close_soon(t, qp)?;
            check_eq!((done, t.log().sent.get()), (done, 8 * i));
            for tag in 0..8 {
                check_eq!((tag, t.log().returned(tag)), (tag, i));
            }
        }
        // Whole chains only.
        check_eq!(t.log().succeeded.get(), 4 + 4 + 8);
        check_eq!(t.log().misplaced.get(), 0);
        check_eq!(t.count(Count::Leased), 0);
        Ok(())
    }

    #[test]
    fn dropped_in_the_middle_anywhere_all_come_back_once() -> Result {
        with_device(Setup::new(), |t| {
            for (i, place) in (1..).zip(Place::ALL) {
                let qp = rows::<Softirq>(t, 4, false)?;
                qp.post_sends_as_one(&mut t.requests::<16>(0..4)?)?;
                complete(t, qp.num(), 2)?;
                place.run(move || drop(qp));
                check!(t.completed(4 * i));
                check_eq!(t.log().returned(0), i);
            }
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            Ok(())
        })
    }

    #[test]
    fn what_a_driver_refuses_stays_and_what_it_took_comes_back() -> Result {
        with_device(Setup::new(), |t| {
            let mut back = 0;
            for taken in 0..4u32 {
                let qp = rows::<Softirq>(t, 8, false)?;
                t.fake().fail_after(Op::PostSend, taken, 1, EIO);
                let mut sends = t.requests::<16>(0..4)?;
                check_eq!(qp.post_sends_as_one(&mut sends), Err(EIO));
                check_eq!(sends.len(), 4 - taken as usize);
                check_eq!(t.fake().sends(qp.num()), taken);
                // Nobody is there to speak for those.
                let posted = qp.post_sends_as_one(&mut sends);
                let expected = if taken == 0 { Ok(()) } else { Err(ESHUTDOWN) };
                check_eq!((taken, posted), (taken, expected));
                complete(t, qp.num(), taken)?;
                drop(sends);
                close_soon(t, qp)?;
                back += if taken == 0 { 4 } else { taken };
                check_eq!((taken, t.log().sent.get()), (taken, back));
            }
            check_eq!(t.log().flushed.get(), back);
            check_eq!(t.log().tags_dropped.get(), t.log().tags_made.get());
            Ok(())
        })
    }

    #[test]
    fn after_a_refusal_the_earlier_ones_still_come_back_together() -> Result {
        with_device(Setup::new(), |t| {
            let qp = rows::<Workqueue>(t, 12, false)?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..4)?)?;
            qp.post_sends_as_one(&mut t.requests::<16>(4..8)?)?;
            t.fake().fail_after(Op::PostSend, 3, 1, EIO);
            let mut refused = t.requests::<16>(8..12)?;
            check_eq!(qp.post_sends_as_one(&mut refused), Err(EIO));
            check_eq!(refused.len(), 1);
            complete(t, qp.num(), 9)?;
            check!(t.completed(8));
            check_eq!(t.log().b.get(), 2);
            close_soon(t, qp)?;
            each_returned(t, 11)?;
            check_eq!(t.log().flushed.get(), 3);
            Ok(())
        })
    }

    #[test]
    fn what_the_driver_is_silent_about_comes_back_once() -> Result {
        with_device(Setup::new(), |t| undecided(t, Refusal::Unnamed))?;
        with_device(Setup::new(), |t| undecided(t, Refusal::Taken))
    }

    fn undecided(t: &mut Test<'_>, refusal: Refusal) -> Result {
        t.fake().refuse(refusal);
        t.fake().fail_after(Op::PostSend, 2, 1, EIO);
        let qp = rows::<Workqueue>(t, 8, false)?;
        let mut sends = t.requests::<16>(0..4)?;
        check_eq!(qp.post_sends_as_one(&mut sends), Err(EIO));
        check!(sends.is_empty());
        close_soon(t, qp)?;
        each_returned(t, 4)
    }

    #[test]
    fn a_device_that_tells_of_each_is_believed() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().talk(true);
            let qp = rows::<Softirq>(t, 8, false)?;
            for round in 1..=3 {
                let mut sends = t.requests::<16>(0..8)?;
                check!(eventually(|| qp.post_sends_as_one(&mut sends).is_ok()));
                complete(t, qp.num(), 8)?;
                check!(t.completed(8 * round));
            }
            check_eq!(t.log().a.get(), 24);
            check_eq!(t.log().b.get(), 0);
            check_eq!(t.log().succeeded.get(), 24);
            close_soon(t, qp)
        })
    }

    #[test]
    fn polled_by_hand_they_go_to_the_handler_together() -> Result {
        with_device(Setup::new(), |t| {
            let depths = Depths { send: 8, recv: 0 };
            let cq = CompletionQueue::<Direct>::create(t.dev, 16, None, t.may_sleep())?;
            let qp = rows_on(t, &cq, depths, false)?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..4)?)?;
            qp.post_sends_as_one(&mut t.requests::<16>(4..8)?)?;
            complete(t, qp.num(), 5)?;
            let mut slots = [const { PollSlot::new() }; 8];
            {
                let polled = cq.poll(&mut slots)?;
                check_eq!(polled.len(), 1);
                let last = polled.iter().next().ok_or(EINVAL)?;
                check!(last.is_of(&qp) && !last.is_recv() && last.result().is_ok());
                check!(last.into_request(&qp).is_err());
            }
            each_returned(t, 4)?;
            check_eq!(t.log().b.get(), 1);
            // One that failed can be had.
            t.fake().complete_send(qp.num(), Wc::failed(10))?;
            {
                let polled = cq.poll(&mut slots)?;
                let failed = polled.iter().next().ok_or(EINVAL)?;
                let request = failed.into_request(&qp).map_err(|_| EINVAL)?;
                check_eq!(request.tag().id, 5);
            }
            close_soon(t, qp)?;
            for tag in [4, 6, 7] {
                check_eq!((tag, t.log().returned(tag)), (tag, 1));
            }
            check_eq!(t.log().returned(5), 0);
            Ok(())
        })
    }

    #[test]
    fn requests_go_from_chains_to_others_and_alone() -> Result {
        with_device(Setup::new(), |t| {
            let qp = t.connected::<Softirq>(16, 16, |call, request| {
                let mut one = Chain::<_, 16>::new();
                // In turns as a send alone, as a chain of one, and as one again.
                let n = call.log().a.add();
                let _ = match n % 3 {
                    0 => call.qp.post_send(request).map_err(Error::from),
                    1 => {
                        let _ = one.push(request);
                        call.qp.post_sends(&mut one)
                    }
                    _ => {
                        let _ = one.push(request);
                        call.qp.post_sends_as_one(&mut one)
                    }
                };
            })?;
            qp.post_sends_as_one(&mut t.requests::<16>(0..16)?)?;
            complete(t, qp.num(), 16)?;
            for round in 1..=10 {
                check!(t.completed(16 * round));
                check!(eventually(|| t.fake().sends(qp.num()) == 16));
                complete(t, qp.num(), 16)?;
            }
            check!(t.completed(16 * 11));
            check_eq!(t.log().succeeded.get(), 16 * 11);
            close_soon(t, qp)?;
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }

    #[test]
    fn many_come_and_go_under_traffic() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().pump();
            for _ in 0..20 {
                let mut qps = KVec::new();
                for _ in 0..4 {
                    let qp = rows::<Softirq>(t, 16, true)?;
                    for first in [0, 4, 8, 12] {
                        qp.post_sends_as_one(&mut t.requests::<16>(first..first + 4)?)?;
                    }
                    qps.push(qp, GFP_KERNEL)?;
                }
                let before = t.log().sent.get();
                check!(t.completed(before + 200));
                drop(qps);
            }
            check!(eventually(|| t.count(Count::LiveQp) == 0));
            check_eq!(t.log().misplaced.get(), 0);
            check_eq!(t.log().tags_dropped.get(), t.log().tags_made.get());
            check_eq!(t.count(Count::BadPosts), 0);
            Ok(())
        })
    }
}
