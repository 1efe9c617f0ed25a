// SPDX-License-Identifier: GPL-2.0

//! Devices, ports and contexts: what they say of themselves.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_device)]
mod tests {
    use crate::{
        fake::{
            Op,
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        prelude::*,
        str::CString, //
    };
    use rdma::device::{
        PortState,
        Protocol, //
    };

    #[test]
    fn it_has_the_name_it_was_given() -> Result {
        with_device(Setup::new(), |t| {
            let name = CString::try_from_fmt(fmt!("{}", t.dev.name()))?;
            let name = name.to_bytes();
            check!(name.starts_with(b"fake"));
            check!(name.len() > 4 && name[4..].iter().all(u8::is_ascii_digit));
            Ok(())
        })
    }

    #[test]
    fn it_has_the_limits_of_the_driver() -> Result {
        with_device(Setup::new().max_cqe(1234).max_qp_wr(567), |t| {
            check_eq!(t.dev.max_cqe(), 1234);
            check_eq!(t.dev.max_qp_wr(), 567);
            Ok(())
        })
    }

    #[test]
    fn it_may_have_no_vectors() -> Result {
        with_device(Setup::new().vectors(0), |t| {
            check_eq!(t.dev.num_comp_vectors(), 0);
            Ok(())
        })
    }

    #[test]
    fn it_may_have_one_vector_or_eight() -> Result {
        with_device(Setup::new().vectors(1), |t| {
            check_eq!(t.dev.num_comp_vectors(), 1);
            Ok(())
        })?;
        with_device(Setup::new().vectors(8), |t| {
            check_eq!(t.dev.num_comp_vectors(), 8);
            Ok(())
        })
    }

    #[test]
    fn vectors_beyond_a_c_int_are_none() -> Result {
        with_device(Setup::new().vectors(u32::MAX), |t| {
            check_eq!(t.dev.num_comp_vectors(), 0);
            Ok(())
        })
    }

    #[test]
    fn ports_count_from_one() -> Result {
        with_device(Setup::new().ports(2), |t| {
            check_eq!(t.dev.num_ports(), 2);
            for number in [1, 2] {
                let port = t.dev.port(number)?;
                check_eq!(port.number(), number);
                check!(core::ptr::eq(port.device(), t.dev));
            }
            for number in [0, 3, 4, i32::MAX.unsigned_abs(), u32::MAX] {
                check_err!(t.dev.port(number), EINVAL);
            }
            Ok(())
        })
    }

    fn state_is(t: &Test<'_>, state: PortState) -> Result {
        check_eq!(t.dev.port(1)?.state(t.may_sleep())?, state);
        Ok(())
    }

    #[test]
    fn a_port_may_be_down() -> Result {
        with_device(Setup::new().port_state(1), |t| state_is(t, PortState::Down))
    }

    #[test]
    fn a_port_may_be_initializing() -> Result {
        with_device(Setup::new().port_state(2), |t| {
            state_is(t, PortState::Initializing)
        })?;
        with_device(Setup::new().port_state(3), |t| {
            state_is(t, PortState::Initializing)
        })
    }

    #[test]
    fn a_port_may_be_active() -> Result {
        with_device(Setup::new(), |t| state_is(t, PortState::Active))
    }

    #[test]
    fn a_port_may_be_something_else() -> Result {
        with_device(Setup::new().port_state(5), |t| {
            state_is(t, PortState::Other(5))
        })?;
        with_device(Setup::new().port_state(0), |t| {
            state_is(t, PortState::Other(0))
        })
    }

    #[test]
    fn errors_of_the_port_are_passed_on() -> Result {
        with_device(Setup::new(), |t| {
            let port = t.dev.port(1)?;
            for error in [EIO, ENODEV, EINVAL, ETIMEDOUT] {
                t.fake().fail(Op::QueryPort, error);
                check_err!(port.state(t.may_sleep()), error);
            }
            check_eq!(port.state(t.may_sleep()), Ok(PortState::Active));
            for place in Place::ATOMIC {
                let error = place.run_here(|| port.state(t.may_sleep()).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            Ok(())
        })
    }

    #[test]
    fn a_port_says_what_it_speaks() -> Result {
        with_device(Setup::new(), |t| {
            check_eq!(t.dev.port(1)?.protocol(), Protocol::InfiniBand);
            Ok(())
        })?;
        with_device(Setup::new().iwarp(), |t| {
            check_eq!(t.dev.port(1)?.protocol(), Protocol::IWarp);
            Ok(())
        })
    }

    #[test]
    fn addresses_are_those_of_the_driver() -> Result {
        with_device(Setup::new().ports(2), |t| {
            let (one, two) = (t.dev.port(1)?, t.dev.port(2)?);
            check!(one.gid(0)? != two.gid(0)?);
            check_eq!(one.gid(0)?, one.gid(0)?);
            check!(!one.gid(0)?.is_zero());
            check!(!one.gid(0)?.is_ipv4_mapped());
            check!(one.gid(1)?.is_ipv4_mapped());
            check!(!one.gid(1)?.is_zero());
            Ok(())
        })
    }

    #[test]
    fn an_address_that_is_not_there_is_an_error() -> Result {
        with_device(Setup::new(), |t| {
            let port = t.dev.port(1)?;
            check_err!(port.gid(2), ENOENT);
            for index in [3, 4, 127, 128, u8::MAX] {
                check_err!(port.gid(index), EINVAL);
            }
            Ok(())
        })
    }

    #[test]
    fn a_port_without_a_network_interface_has_no_ipv4_address() -> Result {
        with_device(Setup::new(), |t| {
            check_eq!(t.dev.port(1)?.ipv4(), None);
            Ok(())
        })
    }

    #[test]
    fn an_address_can_be_read_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            let port = t.dev.port(1)?;
            let gid = port.gid(0)?;
            for place in [Place::IrqsOff, Place::Spinlock, Place::Rcu, Place::Softirq] {
                let read = place.run(|| port.gid(0) == Ok(gid));
                check_eq!((place, read), (place, Some(true)));
            }
            Ok(())
        })
    }
}

#[kunit_tests(rdma_context)]
mod context {
    use crate::{
        fake::Place,
        harness::*, //
    };
    use kernel::prelude::*;
    use rdma::context::Execution;

    #[test]
    fn a_softirq_is_known() -> Result {
        check_eq!(
            Place::Softirq.run(Execution::current),
            Some(Execution::Softirq)
        );
        outcome()
    }

    #[test]
    fn a_worker_is_known() -> Result {
        check_eq!(
            Place::Worker.run(Execution::current),
            Some(Execution::Worker)
        );
        outcome()
    }

    #[test]
    fn anything_else_is_other() -> Result {
        for place in Place::ALL {
            if matches!(place, Place::Softirq | Place::Worker) {
                continue;
            }
            let current = place.run(Execution::current);
            check_eq!((place, current), (place, Some(Execution::Other)));
        }
        outcome()
    }

    #[test]
    fn a_worker_with_interrupts_off_is_other() -> Result {
        for place in Place::ATOMIC {
            let current = Place::Worker.run(|| place.run_here(Execution::current));
            check_eq!((place, current), (place, Some(Some(Execution::Other))));
        }
        outcome()
    }

    #[test]
    fn a_softirq_that_is_switched_off_is_not_a_softirq() -> Result {
        check_eq!(Place::BhOff.run(Execution::current), Some(Execution::Other));
        outcome()
    }
}
