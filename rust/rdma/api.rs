// SPDX-License-Identifier: GPL-2.0

//! What the completion queues of user space and of the RDMA core offer, and where it is here.
//!
//! The first table goes through the interface that a Rust program in user space has: a completion
//! queue, polled into the caller's slots, that hands out what was completed. The second goes through
//! the functions of `ib_cq_pool_get(9)` and its relatives. Tests with a dot in their name are KUnit
//! cases of `rdma_kunit.ko` (suite and case), among them the examples of this documentation
//! (`rdma_examples`); the rest are tests of `make test`.
//!
//! # As in user space
//!
//! | there | here | shown by |
//! |---|---|---|
//! | the device's context, kept open by all that is made on it | [`Device`], lent for the window of a [`Client`] | `rdma_client.two_devices_are_two_windows`, `rdma_leak.one_of_every_kind_at_once` |
//! | the device's name | [`Device::name`] | `rdma_device.it_has_the_name_it_was_given`, `cases-rxe`, `cases-siw` |
//! | the device's attributes: limits | [`Device::max_cqe`] and the others beside it | `rdma_device.it_has_the_limits_of_the_driver` |
//! | completion vectors | [`Device::num_comp_vectors`] | `rdma_device.it_may_have_one_vector_or_eight` |
//! | GUIDs | [`Device::node_guid`], [`Device::sys_image_guid`], [`Guid`] | `rdma_device.it_says_who_made_it`, `rdma_examples.device_guid` |
//! | vendor, part, version | [`Device::vendor_id`], [`Device::vendor_part_id`], [`Device::hw_ver`] | `rdma_device.it_says_who_made_it` |
//! | firmware version | [`Device::firmware`] | `rdma_device.it_may_have_firmware` |
//! | ports, their state and transport | [`Device::port`], [`Port::state`], [`Port::protocol`] | `rdma_device.ports_count_from_one`, `rdma_device.a_port_may_be_active`, `cases-rxe`, `cases-siw` |
//! | the table of GIDs | [`Port::gid`], [`Port::num_gids`], [`Gid`] | `rdma_device.addresses_are_those_of_the_driver`, `rdma_examples.device_gid` |
//! | the network interface of a port | [`Port::netdev_name`] | `rdma_device.a_port_may_be_on_a_network_interface`, `cases-rxe`, `cases-siw` |
//! | asynchronous events | [`EventHandler`], [`Listener::event`], [`Event`] | `rdma_event.each_kind_is_told_with_its_port`, `rdma_event.an_address_that_changes_is_told_with_its_port` |
//! | the kinds of events, also those to come | [`EventKind`] | `rdma_event.every_number_is_a_kind_and_stays_what_it_is`, `rdma_examples.event_eventkind` |
//! | a completion queue: a shared, counted handle | [`CompletionQueue`], which is `Clone` | `rdma_cq.the_last_handle_may_be_dropped_anywhere`, `rdma_cq.the_last_handle_dropped_in_its_own_softirq_handler`; *example* of [`CompletionQueue`] |
//! | making one of so many entries at least | [`CompletionQueue::create`], in the context of its type | `rdma_cq.it_serves_in_softirq`, `rdma_cq.it_serves_in_a_worker`, `rdma_cq.it_serves_in_an_unbound_worker`, `rdma_cq.handlers_are_called_where_they_are_asked_for` |
//! | a capacity that is no good: an error | `EINVAL`, with a line in the log | `rdma_cq.capacities_out_of_range_are_einval`, `rdma_cq.capacities_beyond_a_c_int_are_einval_whatever_the_device_says` |
//! | what can't be had: an error | `ENOMEM`, or the driver's | `rdma_cq.the_driver_s_errors_are_passed_on` |
//! | the capacity asked for, and the one given | [`CompletionQueue::min_capacity`], [`CompletionQueue::capacity`] | `rdma_cq.a_queue_has_at_least_what_was_asked_for` |
//! | the context of the queue | [`CompletionQueue::device`] | `rdma_cq.what_debug_shows` |
//! | the queue for the log | `Debug` of [`CompletionQueue`] | `rdma_cq.what_debug_shows` |
//! | polling, into the caller's slots | [`CompletionQueue::poll`], [`PollSlot`] | `rdma_cq.what_is_polled_hands_back_its_requests_in_order`, `rdma_cq.no_slots_take_nothing`, `rdma_cq.polling_may_be_done_anywhere` |
//! | more slots than an `int` counts: used up to that | [`CompletionQueue::poll`], with a line in the log | none: the compiler checks it, where slots are counted |
//! | polling by several threads | [`CompletionQueue::poll`], one at a time | `rdma_cq.several_threads_may_poll_one_queue_until_the_client_goes`, `rdma_cq.while_somebody_polls_there_is_nothing_for_others` |
//! | what was polled: how many, and one by one | [`PolledCompletions`] | `rdma_cq.what_is_polled_hands_back_its_requests_in_order`, `rdma_cq.what_nobody_looks_at_goes_to_its_handler` |
//! | nothing there: not an error | an empty iterator | `rdma_cq.an_empty_queue_yields_nothing` |
//! | an owned completion | [`WorkCompletion`], and the request by [`WorkCompletion::into_request`] | `rdma_cq.a_request_of_another_queue_pair_cannot_be_had`, `rdma_cq.a_completion_that_is_forgotten_comes_back_when_its_queue_pair_goes` |
//! | the result of a completion | [`WorkCompletion::result`], [`Completion::result`] | `rdma_completion.of_a_failure_nothing_shows_but_what_is_defined` |
//! | success: opcode | [`Success::opcode`], [`Opcode`] | `rdma_completion.every_number_is_an_opcode_and_stays_what_it_is`, `rdma_completion.an_opcode_that_nobody_knows_is_passed_on`, `rdma_examples.completion_opcode` |
//! | success: bytes received | [`Success::byte_len`] | `rdma_completion.the_length_of_a_receive_is_passed_on`, `rdma_completion.of_a_send_there_is_nothing_to_know_but_that_it_was_sent` |
//! | success: immediate data | [`Success::immediate`] | `rdma_completion.immediate_data_are_the_same_number_on_both_sides`, `rdma_completion.without_the_flag_there_are_no_immediate_data` |
//! | success: invalidated key | [`Success::invalidated_rkey`] | `rdma_completion.an_invalidated_key_is_passed_on` |
//! | error: the raw status | [`Failure::raw_status`] | `rdma_completion.every_status_known_or_not_comes_back_in_softirq` |
//! | error: the vendor's code | [`Failure::vendor_err`] | `rdma_completion.every_status_known_or_not_comes_back_in_a_worker` |
//! | error: a code, also for statuses to come | [`Failure::status`], [`Status`] | `rdma_completion.every_number_is_a_status_and_stays_what_it_is`, `rdma_examples.completion_status` |
//! | error: its class | [`Failure::class`], [`Class`] | `rdma_completion.every_number_is_a_status_and_stays_what_it_is` |
//! | error: a hint, and all of it in one line | [`Failure::hint`], `Display` of [`Failure`] | `rdma_completion.a_failure_is_one_line_that_says_where_to_look` |
//!
//! # As in the RDMA core
//!
//! | there | here | shown by |
//! |---|---|---|
//! | `ib_cq_pool_get()` | [`PooledCq::lease`] | `rdma_lease.one_entry_is_granted`, `rdma_lease.a_queue_is_filled_to_the_last_entry_and_no_further`, `default` |
//! | its `nr_cqe`; how many the queue has; its vector | [`PooledCq::nr_cqe`], [`PooledCq::capacity`], [`PooledCq::vector`] | `rdma_lease.a_small_lease_makes_a_queue_of_4096`, `rdma_lease.a_hint_counts_modulo_the_vectors` |
//! | `ib_cq_pool_put()` | the end of a [`PooledCq`] | `rdma_lease.what_is_dropped_can_be_leased_again`, `rdma_lease.what_the_client_keeps_goes_back_when_it_goes` |
//! | `__ib_alloc_cq()` | [`CompletionQueue::create`], with a vector | `rdma_cq.every_vector_of_the_device_can_be_chosen_and_no_other`, `rdma_cq.a_device_without_vectors_has_none_to_choose` |
//! | `__ib_alloc_cq_any()` | [`CompletionQueue::create`], without one | `rdma_cq.a_queue_has_at_least_what_was_asked_for` |
//! | `ib_free_cq()` | the end of the last [`CompletionQueue`] | `rdma_cq.the_last_handle_may_be_dropped_anywhere`, `rdma_cq.a_leaked_one_goes_with_the_client` |
//! | `ib_process_cq_direct()` | [`CompletionQueue::process`] | `rdma_cq.handlers_are_called_where_they_are_asked_for`, `rdma_cq.a_handler_that_asks_for_more_gets_none` |
//! | `ib_poll_cq()` | [`CompletionQueue::poll`] | `rdma_cq.what_is_polled_hands_back_its_requests_in_order`, `rdma_cq.a_driver_that_cannot_poll_says_so`, `direct`, `cases-siw` |
//! | `ib_send_wr.next` | [`QueuePair::post_sends`], [`QueuePair::post_recvs`], [`Chain`] | `rdma_chain.all_of_a_chain_is_posted_in_order_in_softirq`, `rdma_chain.from_the_one_that_the_driver_names_they_stay`, `cases-rxe` |
//! | `IB_SEND_SIGNALED`, on some sends only | [`QueuePair::post_sends_as_one`], [`ChainHandler::sent_as_one`] | `rdma_as_one.the_last_speaks_for_all_in_a_worker`, `rdma_as_one.they_are_posted_again_in_their_own_places`, `as-one` |
//! | `rdma_set_cq_moderation()`; whether the kernel does it by itself | [`CompletionQueue::set_moderation`], [`CompletionQueue::is_moderation_adaptive`] | `rdma_cq.moderation_is_the_driver_s_business` |
//! | `enum ib_poll_context` | [`PollContext`], [`Poolable`] | `rdma_examples.context_pollcontext`, `rdma_lease.each_context_has_queues_of_its_own`, `softirq`, `workqueue`, `unbound`, `direct`, `private` |
//! | `ib_cqe.done` | [`Handler`] | `rdma_completion.requests_may_complete_in_any_order`, `rdma_completion.hundreds_at_once_come_back_in_softirq` |
//! | `ib_drain_qp()` | [`QueuePair::close`] | `rdma_teardown.full_queues_come_back_in_softirq_when_the_client_goes` |
//! | `ib_wc_status_msg()` | `Display` of [`Status`] | `rdma_completion.every_number_is_a_status_and_stays_what_it_is` |
//! | `ib_event_msg()` | `Display` of [`EventKind`] | `rdma_event.every_number_is_a_kind_and_stays_what_it_is` |

#[cfg(doc)]
use crate::{
    client::Client,
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
        Poolable, //
    },
    cq::CompletionQueue,
    device::{
        Device,
        Gid,
        Guid,
        Port, //
    },
    event::{
        Event,
        EventHandler,
        EventKind,
        Listener, //
    },
    poll::{
        PollSlot,
        PolledCompletions,
        WorkCompletion, //
    },
    pool::PooledCq,
    qp::{
        Chain,
        ChainHandler,
        Handler,
        QueuePair, //
    },
};
