// SPDX-License-Identifier: GPL-2.0

//! Devices, ports and contexts: what they say of themselves.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_device)]
mod tests {
    use crate::{
        fake::{
            Firmware,
            Op,
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        fmt,
        prelude::*,
        str::CString, //
    };
    use rdma::device::{
        Gid,
        Guid,
        PortState,
        Protocol, //
    };

    fn shows(args: fmt::Arguments<'_>, text: &str) -> Result {
        let shown = CString::try_from_fmt(args)?;
        check_eq!(shown.to_str(), Ok(text));
        Ok(())
    }

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
            let limits = |dev: &rdma::device::Device<'_>| {
                [
                    dev.max_cqe(),
                    dev.max_qp_wr(),
                    dev.max_qp(),
                    dev.max_send_sge(),
                    dev.max_recv_sge(),
                    dev.max_sge_rd(),
                    dev.max_qp_rd_atom(),
                    dev.max_qp_init_rd_atom(),
                    dev.max_cq(),
                    dev.max_pd(),
                    dev.max_mr(),
                    dev.max_fast_reg_page_list_len(),
                    dev.max_srq(),
                    dev.max_srq_wr(),
                    dev.max_srq_sge(),
                ]
            };
            let expected = [
                1234, 567, 65536, 31, 32, 30, 16, 17, 65537, 65538, 65539, 511, 65540, 32767, 29,
            ];
            check_eq!(limits(t.dev), expected);
            check_eq!(t.dev.max_mr_size(), 1 << 40);
            check_eq!(t.dev.page_size_cap(), 0xffff_ffff_ffff_f000);
            for place in Place::ALL {
                let here = place.run(|| limits(t.dev));
                check_eq!((place, here), (place, Some(expected)));
            }
            Ok(())
        })
    }

    #[test]
    fn it_says_who_made_it() -> Result {
        with_device(Setup::new(), |t| {
            check_eq!(t.dev.vendor_id(), 0x12_3456);
            check_eq!(t.dev.vendor_part_id(), 4129);
            check_eq!(t.dev.hw_ver(), 7);
            check_eq!(t.dev.node_guid(), Guid::from(0x0002_c903_0012_3456));
            check_eq!(t.dev.sys_image_guid().raw(), 0x0002_c903_00ab_cdef);
            check!(!t.dev.node_guid().is_zero());
            shows(fmt!("{}", t.dev.node_guid()), "0002:c903:0012:3456")?;
            shows(fmt!("{:?}", t.dev.sys_image_guid()), "0002:c903:00ab:cdef")?;
            shows(fmt!("{}", Guid::from(0)), "0000:0000:0000:0000")
        })
    }

    fn firmware_is(t: &Test<'_>, text: &str) -> Result {
        let firmware = t.dev.firmware(t.may_sleep())?;
        check_eq!(firmware.as_str(), text);
        check_eq!(firmware.is_empty(), text.is_empty());
        shows(fmt!("{firmware}"), text)
    }

    #[test]
    fn it_may_have_firmware() -> Result {
        with_device(Setup::new(), |t| firmware_is(t, ""))?;
        with_device(Setup::new().firmware(Firmware::Plain), |t| {
            firmware_is(t, "22.36.1010")
        })
    }

    #[test]
    fn firmware_of_any_length_is_shown_as_far_as_there_is_room() -> Result {
        with_device(Setup::new().firmware(Firmware::Long), |t| {
            firmware_is(t, "0123456789012345678901234567890")
        })
    }

    #[test]
    fn firmware_is_shown_in_one_line() -> Result {
        with_device(Setup::new().firmware(Firmware::Line), |t| {
            firmware_is(t, "1.2.3")
        })
    }

    #[test]
    fn firmware_that_is_not_text_is_a_question_mark() -> Result {
        with_device(Setup::new().firmware(Firmware::Garbage), |t| {
            firmware_is(t, "?")
        })
    }

    #[test]
    fn it_shows_the_essentials() -> Result {
        with_device(Setup::new().ports(2).vectors(3), |t| {
            let expected = CString::try_from_fmt(fmt!(
                "Device {{ name: \"{}\", client: \"rdma_kunit\", vendor_id: 1193046, \
                 vendor_part_id: 4129, hw_ver: 7, node_guid: 0002:c903:0012:3456, num_ports: 2, \
                 num_comp_vectors: 3, max_cqe: 8192, max_qp_wr: 1024, .. }}",
                t.dev.name()
            ))?;
            shows(fmt!("{:?}", t.dev), expected.to_str().map_err(|_| EINVAL)?)?;
            let expected =
                CString::try_from_fmt(fmt!("Port {{ device: \"{}\", number: 2 }}", t.dev.name()))?;
            shows(
                fmt!("{:?}", t.dev.port(2)?),
                expected.to_str().map_err(|_| EINVAL)?,
            )
        })
    }

    #[test]
    fn a_switch_has_no_ports_for_us() -> Result {
        with_device(Setup::new(), |t| {
            t.fake().switch(true);
            let ports = t.dev.num_ports();
            let errors = [0, 1, 2].map(|number| t.dev.port(number).err());
            t.fake().switch(false);
            check_eq!(ports, 0);
            check_eq!(errors, [Some(EINVAL); 3]);
            check_eq!(t.dev.num_ports(), 1);
            Ok(())
        })
    }

    #[test]
    fn a_port_may_be_on_a_network_interface() -> Result {
        with_device(Setup::new().ports(2).netdev(), |t| {
            let (one, two) = (t.dev.port(1)?, t.dev.port(2)?);
            // More than once: the interface is let go of each time, or the kernel would wait for it.
            for _ in 0..100 {
                let name = one.netdev_name(t.may_sleep())?;
                check_eq!(name.as_ref().map(|name| name.as_str()), Some("lo"));
                check!(two.netdev_name(t.may_sleep())?.is_none());
            }
            Ok(())
        })
    }

    #[test]
    fn what_may_sleep_is_refused_where_nobody_may() -> Result {
        with_device(Setup::new().netdev().firmware(Firmware::Plain), |t| {
            let port = t.dev.port(1)?;
            for place in Place::ATOMIC {
                let error = place.run_here(|| t.dev.firmware(t.may_sleep()).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
                let error = place.run_here(|| port.netdev_name(t.may_sleep()).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
                let error = place.run_here(|| port.ipv4(t.may_sleep()).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
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
                check_eq!(port, t.dev.port(number)?);
                check!(port != t.dev.port(3 - number)?);
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
            check_eq!((one.num_gids(), two.num_gids()), (3, 3));
            check_eq!(Gid::from(one.gid(1)?.octets()), one.gid(1)?);
            shows(
                fmt!("{}", two.gid(0)?),
                "fe80:0000:0000:0000:0000:0000:0000:0002",
            )?;
            shows(
                fmt!("{:?}", two.gid(1)?),
                "0000:0000:0000:0000:0000:ffff:0a00:0002",
            )?;
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
            check_eq!(t.dev.port(1)?.ipv4(t.may_sleep()), Ok(None));
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
