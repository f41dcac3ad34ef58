//! Completions: completion queue entries and their status.

use std::fmt;

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U64};

layout!(
    /// A completion (Base, Figure 89 "Common Completion Queue Entry Layout"). On fabrics, dwords 0
    /// and 1 are one value (Figure 82).
    Completion, 16 {
        /// The command's result, besides its data.
        result: U64,
        /// The controller's position in the submission queue; meaningless without flow control.
        queue_head: U16,
        /// Reserved on fabrics.
        queue_id: U16,
        /// The identifier of the completed command.
        command_id: U16,
        /// The status, above a bit that is 0 on fabrics.
        status: U16,
    }
);

impl Completion {
    /// Returns the status.
    pub fn status(&self) -> NvmeStatus {
        NvmeStatus(self.status.get() >> 1)
    }
}

/// Result of a command (Base, Figure 92 "Status Field"): a code in the low byte, its type above,
/// then flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NvmeStatus(pub u16);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        impl NvmeStatus {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// Returns the name of the code, if it is one of the codes listed here.
            pub fn name(self) -> Option<&'static str> {
                match self.code() {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

// Base, Figure 94 "Generic Command Status Values" (type 0).
// Base, Figures 95 to 97 "Command Specific Status Values" (type 1).
// Base, Figure 98 "Media and Data Integrity Error Values" (type 2).
codes! {
    /// The command succeeded.
    SUCCESS = 0x000,
    /// The command is unknown.
    INVALID_OPCODE = 0x001,
    /// A field has an unsupported value.
    INVALID_FIELD = 0x002,
    /// Another command in flight has the same identifier.
    COMMAND_ID_CONFLICT = 0x003,
    /// The controller failed.
    INTERNAL_ERROR = 0x006,
    /// An Abort command ended the command.
    ABORT_REQUESTED = 0x007,
    /// The namespace does not exist, or the command must not name one.
    INVALID_NAMESPACE = 0x00B,
    /// The controller's state does not allow the command.
    COMMAND_SEQUENCE = 0x00C,
    /// The data does not have the length that the command needs.
    DATA_LENGTH_INVALID = 0x00F,
    /// The SGL's type is not supported.
    SGL_TYPE_INVALID = 0x011,
    /// The offset of data in the capsule is not supported.
    SGL_OFFSET_INVALID = 0x016,
    /// The host's identifier has the wrong length.
    HOST_ID_FORMAT = 0x018,
    /// The keep alive timeout is too long, or must not be 0.
    KEEP_ALIVE_INVALID = 0x01A,
    /// The data was damaged in transit; a retry may succeed.
    TRANSIENT_TRANSPORT = 0x022,
    /// Blocks beyond the end of the namespace.
    LBA_OUT_OF_RANGE = 0x080,
    /// No room for the data.
    CAPACITY_EXCEEDED = 0x081,
    /// The queue does not exist, or exists already.
    INVALID_QUEUE = 0x101,
    /// The controller holds as many asynchronous event requests as it accepts.
    ASYNC_LIMIT = 0x105,
    /// The log page does not exist.
    INVALID_LOG_PAGE = 0x109,
    /// The feature cannot be saved.
    FEATURE_NOT_SAVEABLE = 0x10D,
    /// The feature cannot be changed.
    FEATURE_NOT_CHANGEABLE = 0x10E,
    /// Connect: the format is not supported.
    CONNECT_FORMAT = 0x180,
    /// Connect: the controller accepts no more connections.
    CONNECT_BUSY = 0x181,
    /// Connect: a parameter is invalid; the result says which one.
    CONNECT_INVALID = 0x182,
    /// Connect: this host is not allowed.
    CONNECT_INVALID_HOST = 0x184,
    /// The command is not for queues of this type.
    QUEUE_TYPE = 0x185,
    /// The queue is not authenticated.
    AUTHENTICATION_REQUIRED = 0x191,
    /// The command exceeds a limit of the controller (NVM, Figure 16).
    SIZE_LIMIT = 0x183,
    /// Ours, vendor specific: the namespace belongs to another owner.
    CLAIMED = 0x1C0,
    /// Ours, vendor specific: the namespace is unavailable for the moment.
    NOT_NOW = 0x1C1,
    /// The blocks differ from the data.
    COMPARE_FAILURE = 0x285,
}

impl NvmeStatus {
    /// Flag: a retry will fail as well.
    pub const DO_NOT_RETRY: u16 = 1 << 14;

    /// Returns type and code, without flags.
    pub fn code(self) -> u16 {
        self.0 & 0x7FF
    }

    /// Returns whether the command succeeded.
    pub fn is_success(self) -> bool {
        self.code() == 0
    }

    /// Returns the status with [`DO_NOT_RETRY`](Self::DO_NOT_RETRY) set.
    #[must_use]
    pub const fn final_(self) -> Self {
        Self(self.0 | Self::DO_NOT_RETRY)
    }

    /// Returns the status as the field of a completion.
    pub fn to_field(self) -> U16 {
        (self.0 << 1).into()
    }
}

impl fmt::Debug for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NvmeStatus({:#05x} {})", self.0, self.name().unwrap_or("?"))
    }
}

impl fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => {
                write!(f, "{} ({:#05x})", name.to_ascii_lowercase().replace('_', " "), self.code())
            }
            None => write!(f, "status {:#05x}", self.code()),
        }
    }
}
