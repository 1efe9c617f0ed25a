// SPDX-License-Identifier: GPL-2.0

//! Leases of pooled completion queues: who gets how many entries of which queue.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_lease)]
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
            Poolable,
            Softirq,
            UnboundWorkqueue,
            Workqueue, //
        },
        pool::PooledCq, //
    };

    const I32_MAX: u32 = i32::MAX.unsigned_abs();

    #[test]
    fn zero_entries_are_einval() -> Result {
        with_device(Setup::new(), |t| {
            check_err!(t.lease::<Softirq>(0, None), EINVAL);
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn one_entry_is_granted() -> Result {
        with_device(Setup::new(), |t| {
            let lease = t.lease::<Softirq>(1, None)?;
            check_eq!(lease.nr_cqe(), 1);
            check_eq!(t.count(Count::Leased), 1);
            Ok(())
        })
    }

    #[test]
    fn as_many_as_a_queue_can_have_are_granted() -> Result {
        with_device(Setup::new().max_cqe(100), |t| {
            let lease = t.lease::<Softirq>(100, None)?;
            check_eq!(lease.nr_cqe(), 100);
            check_eq!(lease.capacity(), 100);
            check_eq!(t.count(Count::Leased), 100);
            Ok(())
        })
    }

    #[test]
    fn one_more_than_a_queue_can_have_is_einval() -> Result {
        with_device(Setup::new().max_cqe(100), |t| {
            check_err!(t.lease::<Softirq>(101, None), EINVAL);
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn numbers_beyond_a_c_int_are_einval() -> Result {
        with_device(Setup::new(), |t| {
            for nr_cqe in [I32_MAX, I32_MAX + 1, u32::MAX - 1, u32::MAX] {
                check_err!(t.lease::<Softirq>(nr_cqe, None), EINVAL);
            }
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn a_device_without_limits_is_limited_to_a_c_int() -> Result {
        with_device(Setup::new().max_cqe(u32::MAX), |t| {
            check_err!(t.lease::<Softirq>(I32_MAX + 1, None), EINVAL);
            check_err!(t.lease::<Softirq>(u32::MAX, None), EINVAL);
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            // The sum of the two is over 32 bits with sign: they can't share a queue.
            let a = t.lease::<Softirq>(I32_MAX, None)?;
            let b = t.lease::<Softirq>(I32_MAX, None)?;
            check!(a.id() != b.id());
            Ok(())
        })
    }

    #[test]
    fn a_device_without_vectors_is_eopnotsupp() -> Result {
        with_device(Setup::new().vectors(0), |t| {
            check_err!(t.lease::<Softirq>(1, None), EOPNOTSUPP);
            check_err!(t.lease::<Workqueue>(1, Some(0)), EOPNOTSUPP);
            check_err!(t.lease::<UnboundWorkqueue>(1, Some(u32::MAX)), EOPNOTSUPP);
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    #[test]
    fn a_hint_of_any_size_is_granted() -> Result {
        with_device(Setup::new().vectors(8), |t| {
            for hint in [0, 1, 7, 8, I32_MAX, I32_MAX + 1, u32::MAX - 1, u32::MAX] {
                let lease = t.lease::<Softirq>(1, Some(hint))?;
                check!(lease.vector() < 8);
            }
            Ok(())
        })
    }

    #[test]
    fn a_hint_counts_modulo_the_vectors() -> Result {
        with_device(Setup::new().vectors(8), |t| {
            for hint in [0, 1, 2, 7, 8, 1000, I32_MAX, u32::MAX] {
                let lease = t.lease::<Softirq>(1, Some(hint))?;
                let same = t.lease::<Softirq>(1, Some(hint % 8))?;
                check_eq!(lease.vector(), same.vector());
                check_eq!(lease.id(), same.id());
            }
            Ok(())
        })
    }

    #[test]
    fn a_single_vector_takes_any_hint() -> Result {
        with_device(Setup::new(), |t| {
            for hint in [0, 1, 2, I32_MAX, u32::MAX] {
                check_eq!(t.lease::<Softirq>(1, Some(hint))?.vector(), 0);
            }
            Ok(())
        })
    }

    #[test]
    fn without_a_hint_the_vectors_take_turns() -> Result {
        with_device(Setup::new().vectors(8), |t| {
            let first = t.lease::<Softirq>(1, None)?;
            // One queue for each vector in use: as many as there are CPUs, up to 8.
            let used = t.count(Count::LiveCq);
            let mut before = first.vector();
            for _ in 0..2 * used {
                let lease = t.lease::<Softirq>(1, None)?;
                check_eq!(lease.vector(), (before + 1) % used);
                before = lease.vector();
            }
            Ok(())
        })
    }

    #[test]
    fn leases_share_a_queue_that_has_room() -> Result {
        with_device(Setup::new(), |t| {
            let a = t.lease::<Softirq>(100, None)?;
            let b = t.lease::<Softirq>(200, None)?;
            check_eq!(a.id(), b.id());
            check_eq!(t.count(Count::LiveCq), 1);
            check_eq!(t.count(Count::Leased), 300);
            Ok(())
        })
    }

    #[test]
    fn a_queue_is_filled_to_the_last_entry_and_no_further() -> Result {
        with_device(Setup::new().max_cqe(8), |t| {
            let a = t.lease::<Softirq>(5, None)?;
            let b = t.lease::<Softirq>(3, None)?;
            let c = t.lease::<Softirq>(1, None)?;
            check_eq!(a.id(), b.id());
            check!(a.id() != c.id());
            check_eq!(t.count(Count::LiveCq), 2);
            Ok(())
        })
    }

    #[test]
    fn what_is_dropped_can_be_leased_again() -> Result {
        with_device(Setup::new().max_cqe(8), |t| {
            let id = t.lease::<Softirq>(8, None)?.id();
            check_eq!(t.count(Count::Leased), 0);
            check_eq!(t.lease::<Softirq>(8, None)?.id(), id);
            check_eq!(t.fake().calls(Op::CreateCq), 1);
            Ok(())
        })
    }

    #[test]
    fn each_context_has_queues_of_its_own() -> Result {
        with_device(Setup::new(), |t| {
            let a = t.lease::<Softirq>(1, None)?;
            let b = t.lease::<Workqueue>(1, None)?;
            let c = t.lease::<UnboundWorkqueue>(1, None)?;
            check!(a.id() != b.id() && b.id() != c.id() && a.id() != c.id());
            check_eq!(t.count(Count::LiveCq), 3);
            Ok(())
        })
    }

    #[test]
    fn a_small_lease_makes_a_queue_of_4096() -> Result {
        with_device(Setup::new(), |t| {
            check_eq!(t.lease::<Softirq>(1, None)?.capacity(), 4096);
            Ok(())
        })
    }

    #[test]
    fn a_large_lease_makes_a_queue_of_its_size() -> Result {
        with_device(Setup::new(), |t| {
            let lease = t.lease::<Softirq>(5000, None)?;
            check_eq!(lease.capacity(), 5000);
            check_eq!(lease.nr_cqe(), 5000);
            Ok(())
        })
    }

    #[test]
    fn a_lease_knows_its_device() -> Result {
        with_device(Setup::new(), |t| {
            check!(core::ptr::eq(t.lease::<Softirq>(1, None)?.device(), t.dev));
            Ok(())
        })
    }

    #[test]
    fn errors_of_the_driver_are_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            for error in [ENOMEM, EIO, EINVAL, ENOSPC, EBUSY, EAGAIN, ENODEV, EPERM] {
                t.fake().fail(Op::CreateCq, error);
                check_err!(t.lease::<Softirq>(1, None), error);
                check_eq!(t.count(Count::LiveCq), 0);
                check_eq!(t.count(Count::Leased), 0);
            }
            check_eq!(t.lease::<Softirq>(1, None)?.nr_cqe(), 1);
            Ok(())
        })
    }

    #[test]
    fn a_pool_that_can_grow_half_way_only_does_not_grow() -> Result {
        with_device(Setup::new().vectors(8), |t| {
            // Of the queues for each vector the last can't be made.
            drop(t.lease::<Workqueue>(1, None)?);
            let each = t.count(Count::LiveCq);
            t.fake().fail_after(Op::CreateCq, each - 1, 1, ENOSPC);
            check_err!(t.lease::<Softirq>(1, None), ENOSPC);
            check_eq!(t.count(Count::LiveCq), each);
            check_eq!(t.count(Count::Leased), 0);
            Ok(())
        })
    }

    #[test]
    fn a_failure_to_grow_leaves_the_leases_alone() -> Result {
        with_device(Setup::new().max_cqe(8), |t| {
            let lease = t.lease::<Softirq>(8, None)?;
            t.fake().fail(Op::CreateCq, ENOMEM);
            check_err!(t.lease::<Softirq>(1, None), ENOMEM);
            check_eq!(t.count(Count::Leased), 8);
            drop(lease);
            check_eq!(t.lease::<Softirq>(1, None)?.nr_cqe(), 1);
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_a_lease_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let error = place.run_here(|| t.lease::<Softirq>(1, None).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            check_eq!(t.fake().calls(Op::CreateCq), 0);
            Ok(())
        })
    }

    fn dropped_anywhere<C: Poolable>(t: &mut Test<'_>) -> Result {
        for place in Place::ALL {
            let lease = t.lease::<C>(7, None)?;
            check_eq!(t.count(Count::Leased), 7);
            place.run(move || drop(lease));
            check!(eventually(|| t.count(Count::Leased) == 0));
        }
        Ok(())
    }

    #[test]
    fn a_softirq_lease_dropped_anywhere_goes_back() -> Result {
        with_device(Setup::new(), dropped_anywhere::<Softirq>)
    }

    #[test]
    fn a_workqueue_lease_dropped_anywhere_goes_back() -> Result {
        with_device(Setup::new(), dropped_anywhere::<Workqueue>)
    }

    #[test]
    fn an_unbound_lease_dropped_anywhere_goes_back() -> Result {
        with_device(Setup::new(), dropped_anywhere::<UnboundWorkqueue>)
    }

    #[test]
    fn where_sleeping_is_fine_a_drop_gives_back_at_once() -> Result {
        with_device(Setup::new(), |t| {
            for _ in 0..20 {
                let lease = t.lease::<Softirq>(4096, None)?;
                drop(lease);
                check_eq!(t.count(Count::Leased), 0);
            }
            check_eq!(t.fake().calls(Op::CreateCq), 1);
            Ok(())
        })
    }

    #[test]
    fn what_the_client_keeps_goes_back_when_it_goes() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let lease = t.lease::<Softirq>(7, None)?;
                t.keep(lease)?;
                let lease = t.lease::<Workqueue>(9, None)?;
                t.keep(lease)
            },
            |env| {
                check_eq!(env.fake.count(Count::Leased), 0);
                Ok(())
            },
        )
    }

    #[test]
    fn the_pool_stays_until_the_device_goes() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let lease = t.lease::<Softirq>(7, None)?;
                t.keep(lease)?;
                drop(t.lease::<Workqueue>(7, None)?);
                Ok(())
            },
            |env| {
                check_eq!(env.fake.count(Count::LiveCq), 2);
                check_eq!(env.fake.calls(Op::DestroyCq), 0);
                Ok(())
            },
        )
    }

    #[test]
    fn no_queue_is_ever_leased_beyond_its_capacity() -> Result {
        with_device(Setup::new().max_cqe(64).vectors(8), |t| {
            let mut leases: KVec<PooledCq<'_, Softirq>> = KVec::new();
            let mut size = 1;
            for i in 0..120 {
                size = (size * 37 + 11) % 64 + 1;
                leases.push(t.lease(size, None)?, GFP_KERNEL)?;
                if i % 3 == 2 {
                    drop(leases.remove((i * 7) % leases.len()));
                }
            }
            let mut total = 0;
            for lease in &leases {
                let of_queue = |other: &&PooledCq<'_, Softirq>| other.id() == lease.id();
                let leased: u32 = leases.iter().filter(of_queue).map(PooledCq::nr_cqe).sum();
                check!(leased <= lease.capacity());
                total += lease.nr_cqe();
            }
            check_eq!(t.count(Count::Leased), total);
            Ok(())
        })
    }
}
