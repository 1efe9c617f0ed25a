// SPDX-License-Identifier: GPL-2.0

//! Directories in debugfs: when they are there. What reading and writing does, also when all goes, is
//! tested from outside of the kernel: see `scripts/scenarios/debugfs`.

use kernel::prelude::kunit_tests;

#[kunit_tests(rdma_debugfs)]
mod tests {
    use crate::{
        fake::{
            self,
            Setup, //
        },
        harness::*, //
    };
    use kernel::{
        fmt,
        prelude::*,
        str::CString,
        sync::Arc, //
    };
    use rdma::{
        client::Client,
        context::MaySleep,
        debugfs::{
            Directory,
            File, //
        },
        device::Device, //
    };

    /// Counts in `a` that it was made, and in `b` that it was dropped.
    struct Data(Arc<Env>);

    impl Data {
        fn new(t: &Test<'_>) -> Self {
            t.log().a.add();
            Self(t.env.clone())
        }

        fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("shown\n")
        }

        fn take(&self, _: &[u8], _: MaySleep<'_>) -> Result {
            Ok(())
        }
    }

    impl Drop for Data {
        fn drop(&mut self) {
            self.0.log.b.add();
        }
    }

    fn make<'bound>(t: &Test<'bound>) -> Result<Directory<'bound, Data>> {
        let files = [
            File::new(c"one", Data::show),
            File::new(c"two", Data::show).writable(Data::take),
        ];
        Directory::new::<Error, 2>(t.dev, Ok::<_, Error>(Data::new(t)), files, t.may_sleep())
    }

    /// Whether the device has a directory, or that file in it.
    fn has(dev: &Device<'_>, file: Option<&CStr>) -> Result<bool> {
        let device = CString::try_from_fmt(fmt!("{}", dev.name()))?;
        Ok(fake::in_debugfs(TestClient::NAME, Some(&device), file))
    }

    fn client_has_none() -> Result {
        check!(!fake::in_debugfs(TestClient::NAME, None, None));
        Ok(())
    }

    fn all_dropped(env: &Env) -> Result {
        check_eq!(env.log.a.get(), env.log.b.get());
        client_has_none()
    }

    #[test]
    fn a_client_without_has_none() -> Result {
        with_device(Setup::new(), |t| {
            check!(!has(t.dev, None)?);
            client_has_none()
        })
    }

    #[test]
    fn it_is_there_until_it_is_dropped() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let directory = make(t)?;
                check!(has(t.dev, Some(c"one"))?);
                check!(has(t.dev, Some(c"two"))?);
                check!(!has(t.dev, Some(c"three"))?);
                check_eq!(t.log().b.get(), 0);
                drop(directory);
                check!(eventually(|| t.log().b.get() == 1));
                check!(!has(t.dev, None)?);
                Ok(())
            },
            all_dropped,
        )
    }

    #[test]
    fn it_is_gone_when_the_client_is() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let directory = make(t)?;
                t.keep(directory)
            },
            all_dropped,
        )
    }

    #[test]
    fn its_data_can_be_looked_at() -> Result {
        with_device(Setup::new(), |t| {
            let directory = make(t)?;
            check!(Arc::ptr_eq(&directory.data().0, &t.env));
            Ok(())
        })
    }

    #[test]
    fn a_second_one_is_refused_and_the_first_one_stays() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let _directory = make(t)?;
                check_err!(make(t), EEXIST);
                check_eq!(t.log().b.get(), 1);
                check!(has(t.dev, Some(c"one"))?);
                Ok(())
            },
            all_dropped,
        )
    }

    #[test]
    fn two_files_of_one_name_are_refused_with_the_directory() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let files = [
                    File::new(c"one", Data::show),
                    File::new(c"one", Data::show).writable(Data::take),
                ];
                let data = Ok::<_, Error>(Data::new(t));
                check_err!(
                    Directory::new::<Error, 2>(t.dev, data, files, t.may_sleep()),
                    EEXIST
                );
                check_eq!(t.log().b.get(), 1);
                check!(!has(t.dev, None)?);
                Ok(())
            },
            all_dropped,
        )
    }

    #[test]
    fn without_its_data_there_is_none() -> Result {
        with_device(Setup::new(), |t| {
            let data: Result<Data> = Err(EDOM);
            check_err!(
                Directory::new::<Error, 0>(t.dev, data, [], t.may_sleep()),
                EDOM
            );
            check!(!has(t.dev, None)?);
            client_has_none()
        })
    }

    #[test]
    fn a_leak_is_removed() -> Result {
        with_device_then(
            Setup::new(),
            |t| {
                let directory = make(t)?;
                // With what the files show.
                fake::known_leak(directory.data());
                t.leak(directory)
            },
            |env| {
                check_eq!(env.log.b.get(), 0);
                client_has_none()
            },
        )
    }
}
