// SPDX-License-Identifier: GPL-2.0

//! Files in debugfs that show, and take, what lives in a client's window.
//!
//! `kernel::debugfs` has files as well. They ask for data that is `'static`, and a module can go while
//! one of them is open, with the functions that closing it calls.
//!
//! C header: [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h)

use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    fmt, new_mutex,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    str::{
        CStr,
        CString, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Mutex, //
    },
    uaccess::{
        UserPtr,
        UserSlice, //
    },
};
use rdma_bindings as bindings;

use crate::{
    context::MaySleep,
    device::{
        Device,
        Name, //
    },
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    }, //
};

/// The most bytes that a file takes at once.
pub const MAX_WRITE: usize = 4096;

type Show<T> = fn(&T, &mut fmt::Formatter<'_>) -> fmt::Result;
type Take<T> = fn(&T, &[u8], MaySleep<'_>) -> Result;

/// A file of a [`Directory`] whose data is a `T`. Only its owner, the administrator, can open it.
pub struct File<T> {
    name: &'static CStr,
    show: Show<T>,
    take: Option<Take<T>>,
}

impl<T> File<T> {
    /// A file that can be read. `show` writes all of what it has to say each time: who reads in small
    /// pieces gets those of one text.
    pub const fn new(name: &'static CStr, show: Show<T>) -> Self {
        Self {
            name,
            show,
            take: None,
        }
    }

    /// The file can be written as well. `take` gets what was written at once, at most [`MAX_WRITE`]
    /// bytes, and answers with the errno for who wrote it.
    ///
    /// It holds up whoever takes the device away, so it may sleep, but has no business waiting for what
    /// takes its time: it starts that, and another file says how it ended.
    pub const fn writable(self, take: Take<T>) -> Self {
        Self {
            take: Some(take),
            ..self
        }
    }
}

/// A directory in debugfs that lasts as long as the window: `/sys/kernel/debug/CLIENT/DEVICE`.
///
/// Dropping it never waits; before the window ends, the directory is removed, and a call that is
/// reading or writing is waited for. Who still has a file open then gets `ENODEV`, and the module
/// can't be unloaded until the file is closed. The directory keeps its name if the device is given
/// another.
///
/// C functions: `debugfs_create_dir()`, `debugfs_create_file_unsafe()`, `debugfs_remove()`.
///
/// # Examples
///
/// ```
/// use kernel::{fmt, prelude::*, sync::atomic::{Atomic, Relaxed}};
/// use rdma::{context::MaySleep, debugfs::{Directory, File}, device::Device};
///
/// struct Level(Atomic<u32>);
///
/// impl Level {
///     fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
///         writeln!(f, "{}", self.0.load(Relaxed))
///     }
///
///     fn raise(&self, _: &[u8], _: MaySleep<'_>) -> Result {
///         self.0.fetch_add(1u32, Relaxed);
///         Ok(())
///     }
/// }
///
/// fn add<'bound>(
///     dev: &'bound Device<'bound>,
///     may_sleep: MaySleep<'_>,
/// ) -> Result<Directory<'bound, Level>> {
///     let level = File::new(c"level", Level::show).writable(Level::raise);
///     Directory::new(dev, Level(Atomic::new(0)), [level], may_sleep)
/// }
/// ```
///
/// What the files show lives as long as the window:
///
/// ```compile_fail,E0621
/// # use kernel::{fmt, prelude::*};
/// # use rdma::{context::MaySleep, debugfs::Directory, device::Device};
/// fn add<'bound>(dev: &'bound Device<'bound>, level: &u32, may_sleep: MaySleep<'_>) {
///     let _ = Directory::new(dev, level, [], may_sleep);
/// }
/// ```
pub struct Directory<'bound, T: Send + Sync + 'bound>(Owned<'bound, Inner<'bound, T>>);

impl<'bound, T: Send + Sync + 'bound> Directory<'bound, T> {
    /// Makes a directory with the name of the device, and `files` in it, which may be opened before
    /// this returns. Sleeps.
    ///
    /// # Errors
    ///
    /// That of `data`; `ENOMEM`; `EEXIST` if there is such a directory, or two of `files` have one
    /// name; `EPERM` if debugfs is turned off, `ENODEV` if the kernel has none; `EDEADLK` where sleeping
    /// is not possible.
    pub fn new<E, const N: usize>(
        dev: &'bound Device<'bound>,
        data: impl PinInit<T, E>,
        files: [File<T>; N],
        may_sleep: MaySleep<'_>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        may_sleep.check("debugfs::Directory::new")?;
        let inner = KBox::pin_init::<Error>(
            try_pin_init!(&this in Inner {
                node: Node::new::<Inner<'bound, T>>(),
                shown <- Shown::new(dev.name(), data),
                // SAFETY: `this` points to what is being initialized.
                slots: Slot::of(files, unsafe { &raw const (*this.as_ptr()).shown })?,
                // INVARIANT: Nothing that comes after it fails, so it stays until `destroy`.
                dentry: make(dev, slots)?,
                _bound: PhantomData,
            }? Error),
            GFP_KERNEL,
        )?;
        Ok(Self(Register::enroll(dev, inner)?))
    }

    /// What the files show.
    pub fn data(&self) -> &T {
        &self.0.shown.data
    }
}

/// # Invariants
///
/// `dentry` is the directory, whose files have `slots` as their private data, until `destroy`.
#[pin_data]
struct Inner<'bound, T> {
    node: Node,
    #[pin]
    shown: Shown<T>,
    slots: KVec<Slot<T>>,
    dentry: NonNull<kernel::bindings::dentry>,
    _bound: PhantomData<&'bound ()>,
}

// SAFETY: A directory may be made and removed on any thread, and the data is `Send` and `Sync`.
unsafe impl<T: Send + Sync> Send for Inner<'_, T> {}
// SAFETY: As above.
unsafe impl<T: Send + Sync> Sync for Inner<'_, T> {}

// SAFETY: `node` is part of the object. After `destroy` no file leads to it, see `Slot::with`.
unsafe impl<'bound, T: Send + Sync + 'bound> Resource for Inner<'bound, T> {
    const KIND: Kind = Kind::Directory;

    fn node(&self) -> &Node {
        &self.node
    }

    fn begin(&self) {
        self.shown.going.store(true, Relaxed);
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant, and this is done once. It waits for the calls under way.
        unsafe { bindings::rdma_debugfs_remove(self.dentry.as_ptr()) };
        Fate::Free
    }
}

/// What the files are about.
#[pin_data]
struct Shown<T> {
    /// For the log.
    name: Name,
    /// The directory is about to be removed.
    going: Atomic<bool>,
    #[pin]
    data: T,
}

impl<T> Shown<T> {
    fn new<E>(name: Name, data: impl PinInit<T, E>) -> impl PinInit<Self, Error>
    where
        Error: From<E>,
    {
        try_pin_init!(Self {
            name,
            going: Atomic::new(false),
            data <- data,
        }? Error)
    }
}

/// Makes the directory of a device, and a file for each slot.
fn make<T: Send + Sync>(
    dev: &Device<'_>,
    slots: &[Slot<T>],
) -> Result<NonNull<kernel::bindings::dentry>> {
    let name = CString::try_from_fmt(fmt!("{}", dev.name()))?;
    let dentry = dev.debugfs().directory(&name)?;
    for slot in slots {
        let writable = slot.file.take.is_some();
        // SAFETY: The directory was just made. The slot stays where it is until it was removed, with
        // its files, either below or by `destroy`. `OPERATIONS` are for a slot of this type.
        let file = from_err_ptr(unsafe {
            bindings::rdma_debugfs_create_file(
                slot.file.name.as_char_ptr(),
                if writable { 0o600 } else { 0o400 },
                dentry.as_ptr(),
                core::ptr::from_ref(slot).cast_mut().cast(),
                &Slot::<T>::OPERATIONS,
            )
        });
        if let Err(e) = file {
            // SAFETY: As above. It waits for the calls under way.
            unsafe { bindings::rdma_debugfs_remove(dentry.as_ptr()) };
            return Err(e);
        }
    }
    Ok(dentry)
}

/// What a file in debugfs leads to.
///
/// # Invariants
///
/// `shown` is valid until the file is removed.
struct Slot<T> {
    file: File<T>,
    shown: *const Shown<T>,
}

impl<T> Slot<T> {
    /// The slots of `files`. `shown` has to outlive the files that are made of them.
    fn of<const N: usize>(files: [File<T>; N], shown: *const Shown<T>) -> Result<KVec<Self>> {
        let mut slots = KVec::with_capacity(N, GFP_KERNEL)?;
        for file in files {
            // INVARIANT: Said to the caller.
            slots.push(Self { file, shown }, GFP_KERNEL)?;
        }
        Ok(slots)
    }
}

impl<T: Send + Sync> Slot<T> {
    /// The functions of a file. `debugfs_create_file()` would put its own in front of them, which answer
    /// `EIO` when the file was removed.
    const OPERATIONS: kernel::bindings::file_operations = kernel::bindings::file_operations {
        #[cfg(MODULE)]
        owner: &raw mut kernel::bindings::__this_module,
        open: Some(Self::open),
        read: Some(Self::read),
        write: Some(Self::write),
        llseek: Some(Self::llseek),
        release: Some(kernel::bindings::single_release),
        ..pin_init::zeroed()
    };

    /// # Safety
    ///
    /// For debugfs only, which doesn't call it when the file was removed, nor removes it meanwhile.
    unsafe extern "C" fn open(
        inode: *mut kernel::bindings::inode,
        file: *mut kernel::bindings::file,
    ) -> c_int {
        // SAFETY: By the function's requirements, `i_private` is the slot.
        unsafe { kernel::bindings::single_open(file, Some(Self::show), (*inode).i_private) }
    }

    /// # Safety
    ///
    /// For a file that [`Self::open`] opened, in [`Self::with`].
    unsafe extern "C" fn show(seq: *mut kernel::bindings::seq_file, _: *mut c_void) -> c_int {
        // SAFETY: `private` is what `open` was given, and `with` keeps it valid; `seq_read()` holds
        // the lock of the `seq_file`.
        let (slot, seq) = unsafe { (&*(*seq).private.cast::<Self>(), SeqFile::from_raw(seq)) };
        seq_print!(seq, "{}", slot);
        0
    }

    /// Calls `f` with the slot of an open file, unless the file was removed.
    ///
    /// # Safety
    ///
    /// [`Self::open`] opened the file.
    unsafe fn with<R>(
        file: *mut kernel::bindings::file,
        f: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        // SAFETY: The file is an open file of debugfs.
        to_result(unsafe { bindings::rdma_debugfs_get(file) }).map_err(|_| ENODEV)?;
        // SAFETY: The file was not removed, and won't be before the below: the slot that it was made
        // with is valid. `single_open()` put it into a `seq_file`.
        let slot = unsafe {
            let seq = (*file).private_data.cast::<kernel::bindings::seq_file>();
            &*(*seq).private.cast::<Self>()
        };
        let result = if slot.shown().going.load(Relaxed) {
            Err(ENODEV)
        } else {
            f(slot)
        };
        // SAFETY: It was got above.
        unsafe { bindings::rdma_debugfs_put(file) };
        result
    }

    fn shown(&self) -> &Shown<T> {
        // SAFETY: By the type invariant; who has a slot keeps the file from being removed.
        unsafe { &*self.shown }
    }

    /// # Safety
    ///
    /// For a file that [`Self::open`] opened.
    unsafe extern "C" fn read(
        file: *mut kernel::bindings::file,
        buffer: *mut c_char,
        len: usize,
        pos: *mut kernel::bindings::loff_t,
    ) -> isize {
        // SAFETY: The arguments are those of the call.
        let read = |_: &Self| Ok(unsafe { kernel::bindings::seq_read(file, buffer, len, pos) });
        // SAFETY: By the function's requirements.
        unsafe { Self::with(file, read) }.unwrap_or_else(errno)
    }

    /// # Safety
    ///
    /// For a file that [`Self::open`] opened.
    unsafe extern "C" fn llseek(
        file: *mut kernel::bindings::file,
        offset: kernel::bindings::loff_t,
        whence: c_int,
    ) -> kernel::bindings::loff_t {
        // SAFETY: The arguments are those of the call.
        let seek = |_: &Self| Ok(unsafe { kernel::bindings::seq_lseek(file, offset, whence) });
        // SAFETY: By the function's requirements.
        unsafe { Self::with(file, seek) }.unwrap_or_else(|e| e.to_errno().into())
    }

    /// # Safety
    ///
    /// For a file that [`Self::open`] opened.
    unsafe extern "C" fn write(
        file: *mut kernel::bindings::file,
        buffer: *const c_char,
        len: usize,
        _: *mut kernel::bindings::loff_t,
    ) -> isize {
        let take = |slot: &Self| {
            let take = slot.file.take.ok_or(EBADF)?;
            if len > MAX_WRITE {
                log_refusal!(
                    "{}: {}: {} bytes were written at once, {} are taken at most\n",
                    slot.shown().name,
                    slot.file.name,
                    len,
                    MAX_WRITE
                );
                return Err(EINVAL);
            }
            let mut bytes = KVec::new();
            UserSlice::new(UserPtr::from_ptr(buffer.cast_mut().cast()), len)
                .read_all(&mut bytes, GFP_KERNEL)?;
            take(&slot.shown().data, &bytes, MaySleep::new())?;
            Ok(isize::try_from(len)?)
        };
        // SAFETY: By the function's requirements.
        unsafe { Self::with(file, take) }.unwrap_or_else(errno)
    }
}

/// What a function returns instead of a number of bytes.
fn errno(error: Error) -> isize {
    // A number of 32 bits at least, in every kernel that has Rust.
    error.to_errno() as isize
}

impl<T: Send + Sync> fmt::Display for Slot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.file.show)(&self.shown().data, f)
    }
}

/// The directory with the name of a client, in which those of its devices are. It is there from the
/// first of them on.
#[pin_data(PinnedDrop)]
pub(crate) struct Root {
    name: &'static CStr,
    #[pin]
    dentry: Mutex<Option<Dentry>>,
}

/// A directory that nobody else removes.
#[derive(Clone, Copy)]
struct Dentry(NonNull<kernel::bindings::dentry>);

// SAFETY: The functions that are called with it do their own locking.
unsafe impl Send for Dentry {}

impl Root {
    pub(crate) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self {
            name,
            dentry <- new_mutex!(None, "rdma::debugfs::Root::dentry"),
        })
    }

    /// Makes a directory in this one.
    fn directory(&self, name: &CStr) -> Result<NonNull<kernel::bindings::dentry>> {
        let create = |name: &CStr, parent| {
            // SAFETY: The name is copied, and `parent` is null, or valid until `self` is dropped.
            let dentry = unsafe { bindings::rdma_debugfs_create_dir(name.as_char_ptr(), parent) };
            NonNull::new(from_err_ptr(dentry)?).ok_or(ENODEV)
        };
        let mut root = self.dentry.lock();
        let parent = match *root {
            Some(dentry) => dentry,
            None => *root.insert(Dentry(create(self.name, core::ptr::null_mut())?)),
        };
        create(name, parent.0.as_ptr())
    }
}

#[pinned_drop]
impl PinnedDrop for Root {
    fn drop(self: Pin<&mut Self>) {
        if let Some(Dentry(dentry)) = *self.dentry.lock() {
            // SAFETY: It was made by `directory`, and those in it are gone with their windows.
            unsafe { bindings::rdma_debugfs_remove(dentry.as_ptr()) };
        }
    }
}
