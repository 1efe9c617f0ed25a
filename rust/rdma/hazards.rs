// SPDX-License-Identifier: GPL-2.0

//! What can go wrong with the RDMA core, and what keeps it from doing so here.
//!
//! Each row names the hazard, what closes it (a type, a check before the call, the order in which
//! things go, or a backstop when they are taken down), and the tests that show it. Tests with a dot in
//! their name are KUnit cases of `rdma_kunit.ko` (suite and case); *example* is an example in the
//! documentation of the item that must not compile; the rest are tests of `make test`.
//!
//! | | hazard | closed by | shown by |
//! |---|---|---|---|
//! | H1 | `ib_cqe` or its owner freed or moved before the completion | type: a post takes the [`WorkRequest`], the completion gives it back | *example* of [`WorkRequest`]; `rdma_post.what_nobody_waits_for_comes_back_when_flushed` |
//! | H2 | queue pair destroyed undrained | backstop: teardown waits for the count of what is in flight | `rdma_teardown.late_completions_are_waited_for`, `rmmod` |
//! | H3 | a drain that fails silently | no drain is used; what the device forgot is handed back once the queue pair is destroyed | `rdma_teardown.a_move_to_the_error_state_that_fails_is_survived`, `rdma_flight.forgotten_sends_come_back_in_softirq` |
//! | H4 | draining in RESET, or without a receive queue | as H3; a queue pair leaves RESET before its owner gets it | `rdma_teardown.one_that_was_never_connected_goes_with_its_receives`, `rdma_qp.one_depth_may_be_zero` |
//! | H5 | no spare slot for a drain's sentinel | no drain is used; a queue pair's lease has an entry more than it has requests | `rdma_teardown.full_queues_come_back_in_softirq_when_the_client_goes` |
//! | H6 | completion queue overrun | check: depths within the lease, and a count that posts can't exceed | `rdma_qp.as_much_in_flight_as_leased_is_einval`, `rdma_completion.queues_never_overrun_when_all_completes_at_once` |
//! | H7 | unsignaled requests complete only on error | the last of a chain speaks for them, and counts for them until then; once one of them completes alone, none speaks for others, and who is left comes back when the queue pair goes; where a driver has a buffer for longer, each is signaled | `rdma_as_one.the_last_speaks_for_all_in_softirq`, `rdma_as_one.one_that_fails_ends_it_and_all_come_back_once`, `rdma_as_one.closed_in_the_middle_all_come_back_once`, `as-one`, `siw-as-one` |
//! | H8 | two queue pairs exceed one queue together | a queue pair takes a lease of its own, or claims its entries of a queue | `rdma_lease.no_queue_is_ever_leased_beyond_its_capacity`, `rdma_cq.queue_pairs_cannot_exceed_it_together` |
//! | H9 | sleeping in a handler that may not | type: [`MaySleep`], which softirq has none of; check: `EDEADLK` | *examples* of [`MaySleep`] and [`Handler`]; `rdma_qp.where_nobody_may_sleep_making_one_is_edeadlk` |
//! | H10 | a handler waiting for a completion of its own queue | type: [`MayWait`], which no handler has | *example* of [`QueuePair::close`](crate::qp::QueuePair::close); `rdma_latch.where_nobody_may_sleep_nobody_waits` |
//! | H11 | drops, drains, unregistering in a handler | a drop never waits; type: clients register by a macro only, listeners with [`MayWait`], which none of them has | `rdma_teardown.dropped_in_a_workqueue_handler`, `rdma_teardown.the_last_handle_dropped_in_its_own_softirq_handler`; *example* of [`EventHandler::new`](crate::event::EventHandler::new) |
//! | H12 | a direct queue polled twice at once, or recursively | one at a time takes completions off it, and never in a handler; type: only direct queues are polled | `rdma_cq.a_handler_that_asks_for_more_gets_none`, `rdma_cq.several_threads_may_poll_one_queue_until_the_client_goes`; *example* of [`CompletionQueue`] |
//! | H13 | a handler running beside itself | type: handlers are `Sync` and get `&self`; a handler is counted until it returns | *example* of [`Handler`]; `rdma_completion.hundreds_at_once_come_back_in_a_worker` |
//! | H14 | `cq_context` that is NULL or stale | it is not used: a request leads to its queue pair | `rdma_completion.completions_of_two_queue_pairs_on_one_queue_find_their_own` |
//! | H15 | a pooled queue freed as a private one | type: [`PooledCq`] and [`CompletionQueue`] each know one way back | `rdma_lease.what_is_dropped_can_be_leased_again`, `rdma_cq.the_last_handle_may_be_dropped_anywhere` |
//! | H16 | a lease put twice, in another size, or too late | type: not `Clone`, its size in it, taken down by the window | `rdma_lease.a_workqueue_lease_dropped_anywhere_goes_back`, `rdma_lease.what_the_client_keeps_goes_back_when_it_goes` |
//! | H17 | `nr_cqe` of 0, over `max_cqe` (endless allocation) or wrapping | check: 1 to [`Device::max_cqe`] | `rdma_lease.one_more_than_a_queue_can_have_is_einval`, `rdma_lease.numbers_beyond_a_c_int_are_einval` |
//! | H18 | a vector out of range, or none | any hint is reduced; no vectors are `EOPNOTSUPP` | `rdma_lease.a_hint_of_any_size_is_granted`, `rdma_lease.a_device_without_vectors_is_eopnotsupp` |
//! | H19 | a pooled queue outside `add` to `remove` | type: the lifetime of the window, which is invariant | *examples* of [`PooledCq`] and [`Device`] |
//! | H20 | `remove` returning with live objects, or racing new ones | backstop: the window takes down all that lives, leaked or not | `rdma_leak.one_of_every_kind_at_once`, `rdma_teardown.queue_pairs_come_and_go_on_all_cpus_until_the_client_does`, `C02-rxe` |
//! | H21 | `add` failing half-way; `add` again for the same device | order: the window is closed as by `remove`; each `add` has a new one | `rdma_client.an_add_that_fails_at_any_step_leaves_nothing`, `rdma_client.a_device_may_come_and_go_again` |
//! | H22 | objects of two devices mixed | type: each window has a lifetime of its own | *example* of [`QueuePair::new`](crate::qp::QueuePair::new); `rdma_client.two_devices_are_two_windows` |
//! | H23 | a protection domain freed under its queue pair; a queue pair that can't be destroyed | type: counted handles; backstop: all it stands on is abandoned with it | `rdma_qp.a_protection_domain_lives_as_long_as_its_last_queue_pair`, `rdma_teardown.one_that_cannot_be_destroyed_keeps_all_it_stands_on` |
//! | H24 | memory regions changed in flight | memory registration is not offered | none: there is nothing to call |
//! | H25 | a buffer aliased while it is remotely writable | remote access is not offered: queue pairs allow none | none: there is nothing to call |
//! | H26 | free-form addresses and keys | type: a request takes a [`DmaBuffer`]; the keys are the library's | *example* of [`WorkRequest`] |
//! | H27 | a mapping undone early or otherwise; stack or vmalloc memory | type: [`DmaBuffer`] allocates, maps and unmaps | `rdma_buffer.of_more_bytes_than_there_are_in_one_piece_is_enomem`, `rdma_completion.no_more_is_written_than_was_posted` |
//! | H28 | a structure that isn't the opcode's; `wr_id` for `wr_cqe` | type: the library fills in both | `rdma_completion.what_the_device_wrote_is_in_the_buffer` |
//! | H29 | `opcode` believed after an error | type: a failure has a status and the vendor's code, no more | `rdma_completion.every_status_known_or_not_comes_back_in_softirq`, `rdma_completion.of_a_failure_nothing_shows_but_what_is_defined` |
//! | H30 | a chain posted in part; `bad_wr` unset | what the driver names, and what comes after, stays in the chain; without `bad_wr` the request stays counted until it is back | `rdma_chain.from_the_one_that_the_driver_names_they_stay`, `rdma_as_one.what_a_driver_refuses_stays_and_what_it_took_comes_back`, `rdma_post.what_was_taken_in_spite_of_an_error_comes_back_once`, `rdma_post.what_was_never_taken_comes_back_when_the_queue_pair_goes` |
//! | H31 | callbacks into a module that is gone; the owner's name | order: `remove` waits for handlers; the name is a copy | `rmmod`; `rdma_client.the_owner_is_the_client_s_name` |
//! | H32 | pool calls with interrupts disabled | check: `EDEADLK`; a drop there is put off | `rdma_lease.where_nobody_may_sleep_a_lease_is_edeadlk`, `rdma_lease.a_softirq_lease_dropped_anywhere_goes_back` |
//!
//! # Where the kernel leaves no way
//!
//! - A driver that can't destroy a queue pair leaves it, and what it stands on, for ever. When the
//!   device goes, the RDMA core warns of it.
//! - What a driver forgot is handed back behind a marker in the completion queue. If no queue pair can be
//!   made for that, the memory is never freed, and the log says so.
//! - siw connects by TCP, and nothing ends that but an answer or the end of TCP's patience, two minutes
//!   by default. A `remove` meanwhile waits for it.
//! - Without `CONFIG_PREEMPT_COUNT` nobody can tell that a spinlock is held: a sleeping call there
//!   isn't refused. Drops are put off there always.

#[cfg(doc)]
use crate::{
    buffer::DmaBuffer,
    context::{
        MaySleep,
        MayWait, //
    },
    cq::CompletionQueue,
    device::Device,
    pool::PooledCq,
    qp::Handler,
    request::WorkRequest, //
};
