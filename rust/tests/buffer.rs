// SPDX-License-Identifier: GPL-2.0

//! Buffers and requests that nobody has posted.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_buffer)]
mod tests {
    use crate::{
        fake::{
            Place,
            Setup, //
        },
        harness::*, //
    };
    use kernel::prelude::*;
    use rdma::{
        buffer::DmaBuffer,
        request::WorkRequest, //
    };

    const I32_MAX: usize = i32::MAX.unsigned_abs() as usize;

    #[test]
    fn of_no_bytes_is_einval() -> Result {
        with_device(Setup::new(), |t| {
            check_err!(DmaBuffer::new(t.dev, 0, t.may_sleep()), EINVAL);
            Ok(())
        })
    }

    #[test]
    fn of_more_bytes_than_a_c_int_is_einval() -> Result {
        with_device(Setup::new(), |t| {
            for len in [
                I32_MAX + 1,
                u32::MAX as usize,
                1 << 32,
                usize::MAX / 2,
                usize::MAX,
            ] {
                check_err!(DmaBuffer::new(t.dev, len, t.may_sleep()), EINVAL);
            }
            Ok(())
        })
    }

    #[test]
    fn of_more_bytes_than_there_are_in_one_piece_is_enomem() -> Result {
        with_device(Setup::new(), |t| {
            for len in [I32_MAX, I32_MAX / 2, 1 << 28] {
                check_err!(DmaBuffer::new(t.dev, len, t.may_sleep()), ENOMEM);
            }
            Ok(())
        })
    }

    #[test]
    fn of_one_byte_to_many_is_granted_and_zero() -> Result {
        with_device(Setup::new(), |t| {
            for len in [1, 2, 63, 4095, 4096, 4097, 65536, 1 << 20] {
                let buffer = DmaBuffer::new(t.dev, len, t.may_sleep())?;
                check_eq!(buffer.len(), len);
                check!(buffer.iter().all(|byte| *byte == 0));
            }
            Ok(())
        })
    }

    #[test]
    fn it_can_be_written_and_read() -> Result {
        with_device(Setup::new(), |t| {
            let mut buffer = DmaBuffer::new(t.dev, 1000, t.may_sleep())?;
            for (i, byte) in buffer.iter_mut().enumerate() {
                *byte = (i % 251) as u8;
            }
            check!(buffer
                .iter()
                .enumerate()
                .all(|(i, byte)| *byte == (i % 251) as u8));
            Ok(())
        })
    }

    #[test]
    fn it_knows_its_device() -> Result {
        with_device(Setup::new(), |t| {
            let buffer = DmaBuffer::new(t.dev, 1, t.may_sleep())?;
            check!(core::ptr::eq(buffer.device(), t.dev));
            Ok(())
        })
    }

    #[test]
    fn where_nobody_may_sleep_making_one_is_edeadlk() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let error = place.run_here(|| DmaBuffer::new(t.dev, 8, t.may_sleep()).err());
                check_eq!((place, error), (place, Some(Some(EDEADLK))));
            }
            Ok(())
        })
    }

    #[test]
    fn it_may_be_dropped_anywhere() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ALL {
                for len in [8, 4096, 1 << 18] {
                    let buffer = DmaBuffer::new(t.dev, len, t.may_sleep())?;
                    place.run(move || drop(buffer));
                }
                let request = t.request(1, 64)?;
                place.run(move || drop(request));
            }
            check_eq!(t.log().tags_dropped.get(), 9);
            Ok(())
        })
    }

    #[test]
    fn a_request_has_all_of_its_buffer() -> Result {
        with_device(Setup::new(), |t| {
            let mut request = t.request(5, 77)?;
            check_eq!(request.len(), 77);
            check!(!request.is_empty());
            check_eq!(request.buffer().len(), 77);
            check_eq!(request.data_mut().len(), 77);
            check_eq!(request.tag().id, 5);
            Ok(())
        })
    }

    #[test]
    fn a_request_may_have_any_part_of_its_buffer_and_no_more() -> Result {
        with_device(Setup::new(), |t| {
            let mut request = t.request(5, 77)?;
            for len in [0, 1, 76, 77] {
                check_eq!(request.set_len(len), Ok(()));
                check_eq!(request.len(), len);
                check_eq!(request.is_empty(), len == 0);
            }
            request.set_len(33)?;
            for len in [78, 79, i32::MAX.unsigned_abs(), u32::MAX] {
                check_eq!(request.set_len(len), Err(EINVAL));
                check_eq!(request.len(), 33);
            }
            check_eq!(request.data().len(), 33);
            // The bytes beyond stay there.
            request.set_len(77)?;
            request.data_mut().fill(7);
            request.set_len(33)?;
            request.data_mut().fill(8);
            check_eq!(request.data(), &[8; 33]);
            check_eq!(&request.buffer()[..33], &[8; 33]);
            check_eq!(&request.buffer()[33..], &[7; 44]);
            Ok(())
        })
    }

    #[test]
    fn a_request_falls_into_its_parts() -> Result {
        with_device(Setup::new(), |t| {
            let mut request = t.request(5, 16)?;
            request.data_mut().fill(7);
            request.tag_mut().id = 6;
            let (buffer, tag) = request.into_parts();
            check_eq!(&buffer[..], &[7; 16]);
            check_eq!(tag.id, 6);
            check_eq!(t.log().tags_dropped.get(), 0);
            drop(tag);
            check_eq!(t.log().tags_dropped.get(), 1);
            // And can be put together again.
            let request = WorkRequest::new(buffer, Tag::new(&t.env, 9), GFP_KERNEL)?;
            check_eq!(request.len(), 16);
            Ok(())
        })
    }

    #[test]
    fn a_request_can_be_made_where_nobody_may_sleep() -> Result {
        with_device(Setup::new(), |t| {
            for place in Place::ATOMIC {
                let buffer = DmaBuffer::new(t.dev, 8, t.may_sleep())?;
                let tag = Tag::new(&t.env, 1);
                let made = place.run_here(|| WorkRequest::new(buffer, tag, GFP_ATOMIC).is_ok());
                check_eq!((place, made), (place, Some(true)));
            }
            Ok(())
        })
    }

    #[test]
    fn a_tag_may_be_anything() -> Result {
        with_device(Setup::new(), |t| {
            let buffer = DmaBuffer::new(t.dev, 8, t.may_sleep())?;
            let request = WorkRequest::new(buffer, (), GFP_KERNEL)?;
            let (buffer, ()) = request.into_parts();
            let request = WorkRequest::new(buffer, [1u64; 100], GFP_KERNEL)?;
            check_eq!(request.tag()[99], 1);
            Ok(())
        })
    }
}
