// SPDX-License-Identifier: GPL-2.0

//! How a work request ended.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_wc`)

use kernel::{
    fmt,
    prelude::*,
    str::CStr, //
};
use rdma_bindings as bindings;

/// How a work request ended: what its entry in the completion queue says.
///
/// This is for a handler to look at. Its [`result`](Self::result) is plain data, to be kept as long as
/// one likes:
///
/// ```
/// use rdma::completion::Completion;
///
/// fn count(completion: &Completion<'_>, bytes: &mut u64) {
///     match completion.result() {
///         Ok(success) => *bytes += u64::from(success.byte_len()),
///         // What ends with its queue pair is no news.
///         Err(failure) if failure.is_flush() => {}
///         Err(failure) => kernel::pr_err!("receive: {failure}\n"),
///     }
/// }
/// ```
///
/// C type: `struct ib_wc`.
pub struct Completion<'a>(&'a bindings::ib_wc);

impl<'a> Completion<'a> {
    #[inline]
    pub(crate) fn new(wc: &'a bindings::ib_wc) -> Self {
        Self(wc)
    }

    /// Success, or why not. May be called from any context; costs a few loads.
    ///
    /// Of a failed request the kernel defines only the status and the vendor's code (and which request
    /// it was), and only these are read.
    #[inline]
    pub fn result(&self) -> Result<Success, Failure> {
        if self.0.status == bindings::ib_wc_status_IB_WC_SUCCESS {
            Ok(Success {
                opcode: self.0.opcode,
                flags: self.0.wc_flags,
                byte_len: self.0.byte_len,
                // SAFETY: Every member of the union is a plain number of the same size.
                ex: unsafe { self.0.ex.invalidate_rkey },
            })
        } else {
            Err(Failure {
                status: self.0.status,
                vendor_err: self.0.vendor_err,
            })
        }
    }
}

const WITH_IMM: c_int = bindings::ib_wc_flags_IB_WC_WITH_IMM as c_int;
const WITH_INVALIDATE: c_int = bindings::ib_wc_flags_IB_WC_WITH_INVALIDATE as c_int;

/// The details of a request that succeeded.
#[derive(Clone, Copy)]
pub struct Success {
    opcode: bindings::ib_wc_opcode,
    flags: c_int,
    byte_len: u32,
    /// Which of the two it is, if any, is in `flags`.
    ex: u32,
}

impl Success {
    /// What was done. C field: `ib_wc.opcode`.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        Opcode::from(self.opcode)
    }

    /// Whether it was a receive: then there is more to know of it. C constant: `IB_WC_RECV`, a bit.
    #[inline]
    pub fn is_recv(&self) -> bool {
        self.opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0
    }

    /// How many bytes were received. Always 0 of anything but a receive, for which the kernel defines
    /// none. C field: `ib_wc.byte_len`.
    ///
    /// This is the device's word, and may be more than the buffer has if the device is wrong.
    #[inline]
    pub fn byte_len(&self) -> u32 {
        if self.is_recv() {
            self.byte_len
        } else {
            0
        }
    }

    /// The immediate data that came with the message, in the byte order of this machine: as a number
    /// it is the same on both sides. C field: `ib_wc.ex.imm_data`, with `IB_WC_WITH_IMM` set.
    ///
    /// Of a receive only: some drivers set the flag on the sender's side as well, without the data.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        self.has(WITH_IMM).then(|| u32::from_be(self.ex))
    }

    /// The key of this side's memory that the other side's message invalidated.
    /// C field: `ib_wc.ex.invalidate_rkey`, with `IB_WC_WITH_INVALIDATE` set.
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        self.has(WITH_INVALIDATE).then_some(self.ex)
    }

    #[inline]
    fn has(&self, flag: c_int) -> bool {
        self.is_recv() && self.flags & flag != 0
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Success");
        f.field("opcode", &self.opcode());
        if self.is_recv() {
            f.field("byte_len", &self.byte_len());
        }
        if let Some(immediate) = self.immediate() {
            f.field("immediate", &immediate);
        }
        if let Some(rkey) = self.invalidated_rkey() {
            f.field("invalidated_rkey", &rkey);
        }
        f.finish()
    }
}

/// Why a request failed.
///
/// Printed, it is one line for the log: the kernel's words for the status, its number, the vendor's
/// code, and where to look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    status: bindings::ib_wc_status,
    vendor_err: u32,
}

impl Failure {
    /// Whether the request was only given back, since the queue pair ended before its turn came.
    #[inline]
    pub fn is_flush(&self) -> bool {
        self.status == bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR
    }

    /// The status: what went wrong. C field: `ib_wc.status`.
    pub fn status(&self) -> Status {
        Status::from(self.status)
    }

    /// The number of the status, as the driver reported it. C type: `enum ib_wc_status`.
    #[inline]
    pub fn raw_status(&self) -> u32 {
        self.status
    }

    /// The vendor's own code, to be looked up in what the vendor has written. C field:
    /// `ib_wc.vendor_err`.
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        self.vendor_err
    }

    /// What kind of failure it is.
    pub fn class(&self) -> Class {
        self.status().class()
    }

    /// Where to look, in one sentence.
    pub fn hint(&self) -> &'static str {
        self.status().hint()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!(
            "{} (status {}, vendor error {:#x}): {}",
            self.status(),
            self.status,
            self.vendor_err,
            self.hint()
        ))
    }
}

/// What kind of failure a [`Status`] is: in whose hands it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// None: the request succeeded.
    Success,
    /// This side's request was wrong in itself: a mistake in the program that posted it.
    Local,
    /// Memory of this side was not what the request took it for: a key, an address, an access right.
    Protection,
    /// The other side refused the request or failed to carry it out: the reason is over there.
    Remote,
    /// The two sides did not get through to each other: the way between them, or the other side's
    /// being there and ready.
    Transport,
    /// The request was given back because of something that had happened before.
    Flush,
    /// The device, or its driver, is at its end.
    Fatal,
    /// The status does not say.
    Unknown,
}

numbers! {
    /// The status of a request that is complete.
    ///
    /// Any number becomes one, and is kept:
    ///
    /// ```
    /// use rdma::completion::{Class, Status};
    ///
    /// assert_eq!(Status::from(12), Status::RetryExceeded);
    /// assert_eq!(Status::RetryExceeded.raw(), 12);
    /// assert_eq!(Status::RetryExceeded.class(), Class::Transport);
    /// // Perhaps of a later kernel.
    /// assert_eq!(Status::from(1000), Status::Unknown(1000));
    /// assert_eq!(Status::from(1000).raw(), 1000);
    /// ```
    ///
    /// C type: `enum ib_wc_status`.
    Status: ib_wc_status;
    /// It succeeded. A [`Failure`] never has this.
    Success = IB_WC_SUCCESS,
    /// The message is longer than the buffer posted for it, or than the port allows.
    LocalLength = IB_WC_LOC_LEN_ERR,
    /// The queue pair can't carry out such a request.
    LocalQpOperation = IB_WC_LOC_QP_OP_ERR,
    /// The end-to-end context can't carry out such a request. Of reliable datagrams only.
    LocalEecOperation = IB_WC_LOC_EEC_OP_ERR,
    /// The request's own memory is not accessible by the key that it names.
    LocalProtection = IB_WC_LOC_PROT_ERR,
    /// The queue pair was in the error state before the request's turn came.
    Flushed = IB_WC_WR_FLUSH_ERR,
    /// A memory window can't be bound so.
    MemoryWindowBind = IB_WC_MW_BIND_ERR,
    /// The other side's answer makes no sense.
    BadResponse = IB_WC_BAD_RESP_ERR,
    /// The other side's write does not fit this side's memory.
    LocalAccess = IB_WC_LOC_ACCESS_ERR,
    /// The other side did not understand the request, or doesn't allow such a one.
    RemoteInvalidRequest = IB_WC_REM_INV_REQ_ERR,
    /// The other side's memory is not accessible by the key that the request names.
    RemoteAccess = IB_WC_REM_ACCESS_ERR,
    /// The other side failed to carry out the request.
    RemoteOperation = IB_WC_REM_OP_ERR,
    /// The other side did not answer, as often as it was tried.
    RetryExceeded = IB_WC_RETRY_EXC_ERR,
    /// The other side had no receive posted, as often as it was tried.
    RnrRetryExceeded = IB_WC_RNR_RETRY_EXC_ERR,
    /// The reliable datagram domains don't match. Of reliable datagrams only.
    LocalRddViolation = IB_WC_LOC_RDD_VIOL_ERR,
    /// The other side rejected the message. Of reliable datagrams only.
    RemoteInvalidRdRequest = IB_WC_REM_INV_RD_REQ_ERR,
    /// The other side, or who runs it, aborted the request.
    RemoteAborted = IB_WC_REM_ABORT_ERR,
    /// There is no such end-to-end context. Of reliable datagrams only.
    InvalidEecNumber = IB_WC_INV_EECN_ERR,
    /// The end-to-end context is in no state for it. Of reliable datagrams only.
    InvalidEecState = IB_WC_INV_EEC_STATE_ERR,
    /// The device can't go on.
    Fatal = IB_WC_FATAL_ERR,
    /// No response came in time.
    ResponseTimeout = IB_WC_RESP_TIMEOUT_ERR,
    /// Anything else, as far as the driver says.
    General = IB_WC_GENERAL_ERR,
}

impl Status {
    /// What kind of failure it is.
    pub fn class(self) -> Class {
        match self {
            Self::Success => Class::Success,
            Self::LocalLength
            | Self::LocalQpOperation
            | Self::LocalEecOperation
            | Self::LocalRddViolation
            | Self::InvalidEecNumber
            | Self::InvalidEecState => Class::Local,
            Self::LocalProtection | Self::LocalAccess | Self::MemoryWindowBind => Class::Protection,
            Self::RemoteInvalidRequest
            | Self::RemoteAccess
            | Self::RemoteOperation
            | Self::RemoteInvalidRdRequest
            | Self::RemoteAborted => Class::Remote,
            Self::BadResponse
            | Self::RetryExceeded
            | Self::RnrRetryExceeded
            | Self::ResponseTimeout => Class::Transport,
            Self::Flushed => Class::Flush,
            Self::Fatal => Class::Fatal,
            Self::General | Self::Unknown(_) => Class::Unknown,
        }
    }

    /// Where to look, in one sentence.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Success => "nothing is wrong",
            Self::LocalLength => {
                "compare the length of the message with the buffer that was posted to receive it"
            }
            Self::LocalQpOperation => {
                "check the request against what the queue pair was made for: opcode, scatter entries, \
                 inline data"
            }
            Self::LocalEecOperation
            | Self::LocalRddViolation
            | Self::RemoteInvalidRdRequest
            | Self::InvalidEecNumber
            | Self::InvalidEecState => {
                "this is about reliable datagrams, which Linux doesn't have: suspect the driver"
            }
            Self::LocalProtection => {
                "check the request's lkey and addresses: same protection domain as the queue pair, \
                 still mapped, within the region"
            }
            Self::Flushed => {
                "the queue pair failed or was closed before: look for the first failure on it that is \
                 not a flush"
            }
            Self::MemoryWindowBind => {
                "check that the region allows windows, and the range and rights of this one"
            }
            Self::BadResponse => {
                "look for packets of an old connection: a queue pair number or a sequence number in \
                 use twice"
            }
            Self::LocalAccess => {
                "the other side wrote with immediate data: check the address and rkey that it was \
                 given, and the rights of the region"
            }
            Self::RemoteInvalidRequest => {
                "check on the other side that its receive is long enough, and that its queue pair \
                 allows the operation"
            }
            Self::RemoteAccess => {
                "check rkey and address against the region on the other side: its range, its rights, \
                 whether it was invalidated"
            }
            Self::RemoteOperation => {
                "look at the failure of the receive on the other side, and at its log"
            }
            Self::RetryExceeded => {
                "the other side does not answer: check its queue pair, the link, the route and the \
                 MTU, then timeout and retry_cnt"
            }
            Self::RnrRetryExceeded => {
                "the other side is slow to post receives: check the flow control, then min_rnr_timer \
                 and rnr_retry"
            }
            Self::RemoteAborted => "look for what ended the queue pair on the other side",
            Self::Fatal => {
                "look at what the driver has logged, and for the event of a device that failed"
            }
            Self::ResponseTimeout => {
                "the other side does not answer in time: check it, the link and the route"
            }
            Self::General => "look up the vendor error, and at what the driver has logged",
            Self::Unknown(_) => {
                "look for the status in the headers of the driver's kernel, and look up the vendor \
                 error"
            }
        }
    }
}

/// The kernel's words for it. C function: `ib_wc_status_msg()`.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: Takes any number and returns a static string.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_wc_status_msg(self.raw())) };
        f.write_str(text.to_str().unwrap_or("?"))
    }
}

numbers! {
    /// What was done, of a request that succeeded.
    ///
    /// Of what this library can post so far only sends and receives complete.
    ///
    /// ```
    /// use rdma::completion::Opcode;
    ///
    /// assert_eq!(Opcode::from(0), Opcode::Send);
    /// assert_eq!(Opcode::Recv.raw(), 128);
    /// assert_eq!(Opcode::from(1000), Opcode::Unknown(1000));
    /// ```
    ///
    /// C type: `enum ib_wc_opcode`.
    Opcode: ib_wc_opcode;
    /// A message was sent.
    Send = IB_WC_SEND,
    /// The other side's memory was written.
    RdmaWrite = IB_WC_RDMA_WRITE,
    /// The other side's memory was read.
    RdmaRead = IB_WC_RDMA_READ,
    /// A number of the other side was compared and swapped.
    CompareSwap = IB_WC_COMP_SWAP,
    /// A number of the other side was fetched and added to.
    FetchAdd = IB_WC_FETCH_ADD,
    /// A memory window was bound.
    BindMw = IB_WC_BIND_MW,
    /// A key of this side was invalidated.
    LocalInvalidate = IB_WC_LOCAL_INV,
    /// A large message was sent in segments.
    Lso = IB_WC_LSO,
    /// A number of the other side was written, as a whole.
    AtomicWrite = IB_WC_ATOMIC_WRITE,
    /// A memory region was registered.
    RegMr = IB_WC_REG_MR,
    /// Some bits of a number of the other side were compared and swapped.
    MaskedCompareSwap = IB_WC_MASKED_COMP_SWAP,
    /// Fields of a number of the other side were fetched and added to.
    MaskedFetchAdd = IB_WC_MASKED_FETCH_ADD,
    /// What had been written to the other side's memory was made visible or lasting.
    Flush = IB_WC_FLUSH,
    /// A message was received.
    Recv = IB_WC_RECV,
    /// The other side wrote to this side's memory, and sent immediate data with it.
    RecvRdmaWithImm = IB_WC_RECV_RDMA_WITH_IMM,
}
