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
            Wc,
            POISON, //
        },
        harness::*, //
    };
    use kernel::{
        fmt,
        new_spinlock_irq,
        prelude::*,
        str::CString,
        sync::{
            Arc,
            SpinLockIrq, //
        }, //
    };
    use rdma::{
        completion::{
            Class,
            Completion,
            Failure,
            Opcode,
            Status,
            Success, //
        },
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
            Poster,
            QueuePair, //
        },
        request::WorkRequest, //
    };

    /// C constants: `IB_WC_WR_FLUSH_ERR`, `IB_WC_GENERAL_ERR`.
    const FLUSH_ERR: u32 = 5;
    const GENERAL_ERR: u32 = 21;

    /// Every status of `enum ib_wc_status`, by its number.
    const STATUSES: [(Status, Class); 22] = [
        (Status::Success, Class::Success),
        (Status::LocalLength, Class::Local),
        (Status::LocalQpOperation, Class::Local),
        (Status::LocalEecOperation, Class::Local),
        (Status::LocalProtection, Class::Protection),
        (Status::Flushed, Class::Flush),
        (Status::MemoryWindowBind, Class::Protection),
        (Status::BadResponse, Class::Transport),
        (Status::LocalAccess, Class::Protection),
        (Status::RemoteInvalidRequest, Class::Remote),
        (Status::RemoteAccess, Class::Remote),
        (Status::RemoteOperation, Class::Remote),
        (Status::RetryExceeded, Class::Transport),
        (Status::RnrRetryExceeded, Class::Transport),
        (Status::LocalRddViolation, Class::Local),
        (Status::RemoteInvalidRdRequest, Class::Remote),
        (Status::RemoteAborted, Class::Remote),
        (Status::InvalidEecNumber, Class::Local),
        (Status::InvalidEecState, Class::Local),
        (Status::Fatal, Class::Fatal),
        (Status::ResponseTimeout, Class::Transport),
        (Status::General, Class::Unknown),
    ];

    #[test]
    fn every_number_is_a_status_and_stays_what_it_is() -> Result {
        for raw in 0..=255 {
            let status = Status::from(raw);
            check_eq!(status.raw(), raw);
            let known = usize::try_from(raw).ok().and_then(|i| STATUSES.get(i));
            let expected = known.map_or((Status::Unknown(raw), Class::Unknown), |known| *known);
            check_eq!((status, status.class()), expected);
            // One sentence, for one line.
            check!(status.hint().len() > 10 && !status.hint().contains(['\n', '.']));
            let words = text(fmt!("{status}"))?;
            let unknown = words.to_bytes() == b"unrecognized status";
            check_eq!((raw, unknown), (raw, known.is_none()));
        }
        for raw in [256, 0x8000_0000, u32::MAX] {
            check_eq!(Status::from(raw), Status::Unknown(raw));
            check_eq!(Status::from(raw).raw(), raw);
        }
        outcome()
    }

    #[test]
    fn every_number_is_an_opcode_and_stays_what_it_is() -> Result {
        let known = [
            (0, Opcode::Send),
            (1, Opcode::RdmaWrite),
            (2, Opcode::RdmaRead),
            (3, Opcode::CompareSwap),
            (4, Opcode::FetchAdd),
            (5, Opcode::BindMw),
            (6, Opcode::LocalInvalidate),
            (7, Opcode::Lso),
            (8, Opcode::Flush),
            (9, Opcode::AtomicWrite),
            (10, Opcode::RegMr),
            (11, Opcode::MaskedCompareSwap),
            (12, Opcode::MaskedFetchAdd),
            (128, Opcode::Recv),
            (129, Opcode::RecvRdmaWithImm),
        ];
        for raw in Iterator::chain(0..=255, [u32::MAX]) {
            let expected = known
                .iter()
                .find_map(|(number, opcode)| (*number == raw).then_some(*opcode))
                .unwrap_or(Opcode::Unknown(raw));
            check_eq!(Opcode::from(raw), expected);
            check_eq!(expected.raw(), raw);
        }
        outcome()
    }

    fn text(args: fmt::Arguments<'_>) -> Result<CString> {
        CString::try_from_fmt(args)
    }

    type Outcome = Result<Success, Failure>;

    /// What completions said, kept beyond them.
    #[pin_data]
    struct Outcomes {
        #[pin]
        all: SpinLockIrq<KVec<Outcome>>,
    }

    struct Note(Arc<Outcomes>);

    impl<'bound> Handler<'bound> for Note {
        type Context = Softirq;
        type Tag = Tag;

        fn sent(
            &self,
            _: &Poster<'_, 'bound, Self>,
            _: WorkRequest<'bound, Tag>,
            completion: &Completion<'_>,
            _: Softirq,
        ) {
            // There is room: it was reserved.
            let _ = self.0.all.lock().push_within_capacity(completion.result());
        }

        fn received(
            &self,
            _: &Poster<'_, 'bound, Self>,
            _: WorkRequest<'bound, Tag>,
            completion: &Completion<'_>,
            _: Softirq,
        ) {
            let _ = self.0.all.lock().push_within_capacity(completion.result());
        }
    }

    /// Has the device end receives or sends, and says what the handler was told of each.
    fn outcomes(t: &Test<'_>, recv: bool, ends: &[Wc]) -> Result<KVec<Outcome>> {
        let all = KVec::with_capacity(ends.len(), GFP_KERNEL)?;
        let note = Arc::pin_init(
            pin_init!(Outcomes {
                all <- new_spinlock_irq!(all, "rdma_kunit::Outcomes"),
            }),
            GFP_KERNEL,
        )?;
        let depth = u32::try_from(ends.len())?;
        let depths = Depths {
            send: depth,
            recv: depth,
        };
        let qp = QueuePair::new::<Error>(
            &t.pd()?,
            t.lease(depths.total(), None)?,
            t.dev.port(1)?,
            depths,
            Ok::<_, Error>(Note(note.clone())),
            t.may_sleep(),
        )?;
        t.connect(&qp)?;
        // All of them first: after one that fails no more can be posted.
        for _ in ends {
            if recv {
                qp.post_recv(t.request(0, 8)?)?;
            } else {
                qp.post_send(t.request(0, 8)?)?;
            }
        }
        for end in ends {
            t.fake().complete_at(qp.num(), recv, 0, *end, Place::Task)?;
        }
        check!(eventually(|| note.all.lock().len() == ends.len()));
        let all = core::mem::take(&mut *note.all.lock());
        Ok(all)
    }

    #[test]
    fn of_a_failure_nothing_shows_but_what_is_defined() -> Result {
        with_device(Setup::new(), |t| {
            // All else in the completions is poison.
            let statuses = [
                1,
                4,
                FLUSH_ERR,
                12,
                GENERAL_ERR,
                22,
                1000,
                POISON - 1,
                u32::MAX,
            ];
            for recv in [false, true] {
                let outcomes = outcomes(t, recv, &statuses.map(Wc::failed))?;
                for (outcome, status) in outcomes.iter().zip(statuses) {
                    let Err(failure) = outcome else {
                        check!(false);
                        continue;
                    };
                    check_eq!(failure.raw_status(), status);
                    check_eq!(failure.status(), Status::from(status));
                    check_eq!(failure.class(), Status::from(status).class());
                    check_eq!(failure.vendor_err(), 0x77);
                    check_eq!(failure.is_flush(), status == FLUSH_ERR);
                    let shown = text(fmt!("{failure:?}"))?;
                    let expected = text(fmt!("Failure {{ status: {status}, vendor_err: 119 }}"))?;
                    check_eq!(shown.to_bytes(), expected.to_bytes());
                }
            }
            Ok(())
        })
    }

    #[test]
    fn a_failure_is_one_line_that_says_where_to_look() -> Result {
        with_device(Setup::new(), |t| {
            let outcomes = outcomes(t, false, &[12, 300].map(Wc::failed))?;
            let lines: [&[u8]; 2] = [
                b"transport retry counter exceeded (status 12, vendor error 0x77): the other side does \
                  not answer: check its queue pair, the link, the route and the MTU, then timeout and \
                  retry_cnt",
                b"unrecognized status (status 300, vendor error 0x77): look for the status in the \
                  headers of the driver's kernel, and look up the vendor error",
            ];
            for (outcome, line) in outcomes.iter().zip(lines) {
                check!(outcome.is_err());
                if let Err(failure) = outcome {
                    let shown = text(fmt!("{failure}"))?;
                    check_eq!(shown.to_str(), core::str::from_utf8(line));
                }
            }
            Ok(())
        })
    }

    #[test]
    fn of_a_send_there_is_nothing_to_know_but_that_it_was_sent() -> Result {
        with_device(Setup::new(), |t| {
            let flags = Wc::WITH_IMM | Wc::WITH_INVALIDATE;
            // As rxe and mlx5 do: the flags are set, but there are no data.
            let ends = [Wc::ok(8), Wc::ok(8).with(flags, 0)];
            for outcome in &outcomes(t, false, &ends)? {
                let Ok(success) = outcome else {
                    check!(false);
                    continue;
                };
                check_eq!(success.opcode(), Opcode::Send);
                check!(!success.is_recv());
                check_eq!(success.byte_len(), 0);
                check_eq!(success.immediate(), None);
                check_eq!(success.invalidated_rkey(), None);
                let shown = text(fmt!("{success:?}"))?;
                check_eq!(shown.to_bytes(), b"Success { opcode: Send }");
            }
            Ok(())
        })
    }

    /// Opcode, length, immediate data and key of a receive.
    type Details = (Opcode, u32, Option<u32>, Option<u32>);

    fn receives(t: &Test<'_>, ends: &[(Wc, Details)]) -> Result {
        let mut wcs = KVec::new();
        for (wc, _) in ends {
            wcs.push(*wc, GFP_KERNEL)?;
        }
        for (outcome, (_, details)) in outcomes(t, true, &wcs)?.iter().zip(ends) {
            let shown = outcome.map(|success| {
                check!(success.is_recv());
                (
                    success.opcode(),
                    success.byte_len(),
                    success.immediate(),
                    success.invalidated_rkey(),
                )
            });
            check_eq!(shown, Ok(*details));
        }
        Ok(())
    }

    #[test]
    fn immediate_data_are_the_same_number_on_both_sides() -> Result {
        with_device(Setup::new(), |t| {
            let numbers = [0, 1, 0x1234_5678, 0x8000_0000, u32::MAX];
            let ends = numbers.map(|number| {
                let wc = Wc::ok(5).with(Wc::WITH_IMM, u32::to_be(number));
                (wc, (Opcode::Recv, 5, Some(number), None))
            });
            receives(t, &ends)?;
            // The other side may write, and have but the immediate data received.
            let ends = numbers.map(|number| {
                let wc = Wc::ok(0).with(Wc::WITH_IMM, u32::to_be(number)).opcode(129);
                (wc, (Opcode::RecvRdmaWithImm, 0, Some(number), None))
            });
            receives(t, &ends)
        })
    }

    #[test]
    fn an_invalidated_key_is_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            let ends = [0, 0x1234_5678, u32::MAX].map(|rkey| {
                let wc = Wc::ok(8).with(Wc::WITH_INVALIDATE, rkey);
                (wc, (Opcode::Recv, 8, None, Some(rkey)))
            });
            receives(t, &ends)
        })
    }

    #[test]
    fn without_the_flag_there_are_no_immediate_data() -> Result {
        with_device(Setup::new(), |t| {
            // Every flag but the two.
            let others = !(Wc::WITH_IMM | Wc::WITH_INVALIDATE);
            let ends = [0, 1, others].map(|flags| {
                let wc = Wc::ok(8).with(flags, 0x1234_5678);
                (wc, (Opcode::Recv, 8, None, None))
            });
            receives(t, &ends)
        })
    }

    #[test]
    fn an_opcode_that_nobody_knows_is_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            // Those with the bit of receives are taken for such.
            let ends = [130, 255, 0x1_0080].map(|opcode| {
                let wc = Wc::ok(3).opcode(opcode);
                (wc, (Opcode::Unknown(opcode), 3, None, None))
            });
            receives(t, &ends)?;
            for (outcome, opcode) in
                outcomes(t, false, &[13, 77].map(|opcode| Wc::ok(8).opcode(opcode)))?
                    .iter()
                    .zip([13, 77])
            {
                let shown = outcome.map(|success| (success.opcode(), success.byte_len()));
                check_eq!(shown, Ok((Opcode::Unknown(opcode), 0)));
            }
            Ok(())
        })
    }

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
                t.lease(3, None)?,
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
}
