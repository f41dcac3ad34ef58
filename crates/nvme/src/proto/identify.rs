//! Structures that Identify returns.

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use super::NQN_FIELD;

/// Size of every structure that Identify returns, in bytes.
pub const LENGTH: usize = 4096;

/// The model number of our controllers that serve I/O.
pub const MODEL: &str = "Aquifer lease";

/// Structures that Identify can return, by dword 10 (Base, Figure 273 "CNS Values").
pub mod what {
    /// [`Namespace`](super::Namespace) of a namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// [`Controller`](super::Controller).
    pub const CONTROLLER: u8 = 0x01;
    /// The identifiers of active namespaces, as dwords.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// [`Descriptor`](super::Descriptor)s of a namespace.
    pub const DESCRIPTORS: u8 = 0x03;
    /// The command set's properties of a namespace.
    pub const NAMESPACE_OF_SET: u8 = 0x05;
    /// The command set's properties of the controller: [`NvmController`](super::NvmController).
    pub const CONTROLLER_OF_SET: u8 = 0x06;
    /// The identifiers of active namespaces of the command set.
    pub const ACTIVE_NAMESPACES_OF_SET: u8 = 0x07;
    /// [`IndependentNamespace`](super::IndependentNamespace).
    pub const NAMESPACE_INDEPENDENT: u8 = 0x08;
    /// The supported combinations of command sets, as bits in qwords.
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// The NVM command set, in the top byte of Identify's dword 11 (Base, Figure 274 "Command Set
/// Identifiers").
pub const CSI_NVM: u8 = 0;
/// All namespaces, in a command's namespace field.
pub const ALL_NAMESPACES: u32 = 0xFFFF_FFFF;

/// Bits and values in [`Controller`].
pub mod controller {
    /// [`multipath`](super::Controller::multipath): the subsystem can have several controllers.
    pub const MULTIPLE: u8 = 1 << 1;
    /// [`async_events`](super::Controller::async_events): changed namespace attributes.
    pub const NAMESPACE_ATTRIBUTE_NOTICES: u32 = 1 << 8;
    /// [`async_events`](super::Controller::async_events): a changed discovery log.
    pub const DISCOVERY_LOG_NOTICES: u32 = 1 << 31;
    /// [`attributes`](super::Controller::attributes): host identifiers of 16 bytes.
    pub const LONG_HOST_ID: u32 = 1 << 0;
    /// [`attributes`](super::Controller::attributes): any command resets the keep alive timer.
    pub const TRAFFIC_KEEPS_ALIVE: u32 = 1 << 6;
    /// [`kind`](super::Controller::kind): the controller serves I/O.
    pub const IO: u8 = 1;
    /// [`kind`](super::Controller::kind): the controller serves discovery.
    pub const DISCOVERY: u8 = 2;
    /// [`firmware`](super::Controller::firmware): one slot, read only.
    pub const ONE_FIXED_FIRMWARE: u8 = 0b011;
    /// [`log_pages`](super::Controller::log_pages): Commands Supported and Effects.
    pub const LOG_EFFECTS: u8 = 1 << 1;
    /// [`log_pages`](super::Controller::log_pages): offsets and long lengths.
    pub const LOG_OFFSETS: u8 = 1 << 2;
    /// [`commands`](super::Controller::commands): Compare.
    pub const COMPARE: u16 = 1 << 0;
    /// [`commands`](super::Controller::commands): Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// [`commands`](super::Controller::commands): Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// [`write_cache`](super::Controller::write_cache): there is no volatile cache.
    pub const NO_WRITE_CACHE: u8 = 0;
    /// [`write_cache`](super::Controller::write_cache): there is a volatile cache.
    pub const WRITE_CACHE: u8 = 1 << 0;
    /// [`write_cache`](super::Controller::write_cache): Flush may name all namespaces.
    pub const FLUSH_ALL: u8 = 0b11 << 1;
    /// [`sgls`](super::Controller::sgls): supported, at any alignment.
    pub const SGLS: u32 = 1;
    /// [`sgls`](super::Controller::sgls): data in capsules.
    pub const SGL_IN_CAPSULE: u32 = 1 << 20;
    /// [`fabrics_commands`](super::Controller::fabrics_commands): Disconnect.
    pub const DISCONNECT: u16 = 1 << 0;
}

/// Bits and values in [`Namespace`].
pub mod namespace {
    /// [`features`](super::Namespace::features): thin provisioning.
    pub const THIN: u8 = 1 << 0;
    /// [`sharing`](super::Namespace::sharing): several controllers may attach it.
    pub const SHARED: u8 = 1 << 0;
    /// [`deallocated`](super::Namespace::deallocated): deallocated blocks read as zeroes.
    pub const READS_ZEROES: u8 = 1;
    /// [`deallocated`](super::Namespace::deallocated): Write Zeroes can deallocate.
    pub const WRITE_ZEROES_DEALLOCATES: u8 = 1 << 3;
    /// [`deallocated`](super::Namespace::deallocated): mask of the content of deallocated blocks.
    pub const READS: u8 = 0b111;
    /// [`attributes`](super::Namespace::attributes): write protected.
    pub const WRITE_PROTECTED: u8 = 1 << 0;
    /// [`format`](super::Namespace::format): the low bits of the format's number.
    pub const FORMAT: u8 = 0b1111;
    /// [`format`](super::Namespace::format): the high bits of the format's number, at bit 5.
    pub const FORMAT_HIGH: u8 = 0b11 << 5;
    /// [`status`](super::IndependentNamespace::status): the namespace is ready.
    pub const READY: u8 = 1 << 0;
}

layout!(
    /// A controller (Base, Figure 275 "Identify Controller data structure"). Fields that we never
    /// use are reserved here.
    Controller, 4096 {
        /// PCI vendor identifier.
        vendor: U16,
        /// PCI subsystem vendor identifier.
        subsystem_vendor: U16,
        /// Serial number: text, padded with spaces.
        serial: [u8; 20],
        /// Model number: text, padded with spaces.
        model: [u8; 40],
        /// Firmware revision: text, padded with spaces.
        revision: [u8; 8],
        /// Recommended arbitration burst.
        arbitration_burst: u8,
        /// The vendor's OUI.
        ieee: [u8; 3],
        /// Multi-path capabilities (CMIC).
        multipath: u8,
        /// The longest data of a command: 2^n units of 4096 bytes; 0 is no limit (MDTS).
        max_transfer: u8,
        /// The controller's identifier (CNTLID).
        id: U16,
        /// Version, as in the version property.
        version: U32,
        /// Zero.
        reserved_84: [u8; 8],
        /// The asynchronous events that can be enabled (OAES).
        async_events: U32,
        /// Attributes (CTRATT).
        attributes: U32,
        /// Zero.
        reserved_100: [u8; 11],
        /// The controller's type, I/O or discovery (CNTRLTYPE).
        kind: u8,
        /// Zero.
        reserved_112: [u8; 144],
        /// Optional admin commands (OACS).
        admin_commands: U16,
        /// Abort commands in flight at a time, minus one (ACL).
        abort_limit: u8,
        /// Asynchronous event requests in flight at a time, minus one (AERL).
        async_limit: u8,
        /// Firmware slots (FRMW).
        firmware: u8,
        /// Attributes of log pages (LPA).
        log_pages: u8,
        /// Entries of the error log, minus one (ELPE).
        error_entries: u8,
        /// Power states, minus one (NPSS).
        power_states: u8,
        /// Zero.
        reserved_264: [u8; 56],
        /// The unit of the keep alive timeout, in 100 ms; 0 is no support (KAS).
        keep_alive: U16,
        /// Zero.
        reserved_322: [u8; 190],
        /// Log 2 of command sizes in bytes: the required one in the low half, the largest in the
        /// high half (SQES).
        command_size: u8,
        /// Log 2 of completion sizes in bytes, likewise (CQES).
        completion_size: u8,
        /// The most commands in flight on an I/O queue (MAXCMD).
        max_commands: U16,
        /// The largest namespace identifier (NN).
        namespaces: U32,
        /// Optional I/O commands (ONCS).
        commands: U16,
        /// Fused operations (FUSES).
        fused: U16,
        /// Attributes of Format NVM (FNA).
        format: u8,
        /// The volatile write cache (VWC).
        write_cache: u8,
        /// Blocks written atomically, minus one (AWUN).
        atomic_write: U16,
        /// Blocks written atomically even at a power failure, minus one (AWUPF).
        atomic_write_power: U16,
        /// Zero.
        reserved_530: [u8; 6],
        /// SGL support (SGLS).
        sgls: U32,
        /// The largest number of namespaces (MNAN).
        max_namespaces: U32,
        /// Zero.
        reserved_544: [u8; 224],
        /// The subsystem's name (SUBNQN).
        subsystem: [u8; NQN_FIELD],
        /// Zero.
        reserved_1024: [u8; 768],
        /// The largest command capsule on an I/O queue, in units of 16 bytes (IOCCSZ).
        command_capsule: U32,
        /// The largest response capsule on an I/O queue, in units of 16 bytes (IORCSZ).
        response_capsule: U32,
        /// Offset of the data behind the command in a capsule, in units of 16 bytes (ICDOFF).
        data_offset: U16,
        /// Fabrics attributes; bit 0: static controllers (FCATT).
        fabrics_attributes: u8,
        /// The most SGL descriptors in a capsule (MSDBD).
        max_descriptors: u8,
        /// Optional fabrics commands (OFCS).
        fabrics_commands: U16,
        /// Zero.
        reserved_1806: [u8; 2290],
    }
);
layout!(
    /// A block format (NVM, Figure 98 "LBA Format Data Structure").
    BlockFormat, 4 {
        /// Bytes of metadata for each block.
        metadata: U16,
        /// Log 2 of the bytes of a block.
        data: u8,
        /// Relative performance.
        performance: u8,
    }
);
layout!(
    /// A namespace (NVM, Figure 97 "Identify Namespace Data Structure"). Fields that we never use
    /// are reserved here.
    Namespace, 4096 {
        /// Size in blocks (NSZE).
        size: U64,
        /// The most blocks that may be allocated at a time (NCAP).
        capacity: U64,
        /// Allocated blocks (NUSE).
        used: U64,
        /// Features (NSFEAT).
        features: u8,
        /// The number of block formats, minus one (NLBAF).
        formats: u8,
        /// The block format in use (FLBAS).
        format: u8,
        /// Metadata capabilities (MC).
        metadata: u8,
        /// Protection capabilities (DPC).
        protection: u8,
        /// Protection settings (DPS).
        protection_settings: u8,
        /// Multi-path and sharing capabilities (NMIC).
        sharing: u8,
        /// Reservation capabilities (RESCAP).
        reservations: u8,
        /// Progress of Format NVM (FPI).
        format_progress: u8,
        /// Features of deallocated blocks (DLFEAT).
        deallocated: u8,
        /// Zero.
        reserved_34: [u8; 65],
        /// Attributes (NSATTR).
        attributes: u8,
        /// Zero.
        reserved_100: [u8; 4],
        /// Globally unique identifier, or zero (NGUID).
        nguid: [u8; 16],
        /// Extended unique identifier, or zero (EUI64).
        eui64: [u8; 8],
        /// Block formats.
        block_formats: [BlockFormat; 64],
        /// Vendor specific.
        vendor: [u8; 3712],
    }
);
layout!(
    /// A namespace of any command set (Base, Figure 280 "I/O Command Set Independent Identify
    /// Namespace data structure").
    IndependentNamespace, 4096 {
        /// Features (NSFEAT).
        features: u8,
        /// Multi-path and sharing capabilities (NMIC).
        sharing: u8,
        /// Zero.
        reserved_2: [u8; 12],
        /// Status (NSTAT).
        status: u8,
        /// Zero.
        reserved_15: [u8; 4081],
    }
);
layout!(
    /// The NVM command set's limits of a controller (NVM, Figure 102 "Identify Controller Data
    /// Structure").
    NvmController, 4096 {
        /// The largest Verify: 2^n units of 4096 bytes; 0 is no limit (VSL).
        verify_limit: u8,
        /// The largest Write Zeroes: 2^n units of 4096 bytes; 0 is no limit (WZSL).
        write_zeroes_limit: u8,
        /// The largest Write Uncorrectable, likewise (WUSL).
        write_uncorrectable_limit: u8,
        /// The most ranges of a Dataset Management command; 0 is 256 (DMRL).
        ranges_limit: u8,
        /// The most blocks of one range; 0 is no limit (DMRSL).
        range_limit: U32,
        /// The most blocks in all ranges of one command; 0 is no limit (DMSL).
        blocks_limit: U64,
        /// Zero.
        reserved_16: [u8; 4080],
    }
);
layout!(
    /// Header of a namespace identifier, which follows (Base, Figure 277 "Namespace Identification
    /// Descriptor").
    Descriptor, 4 {
        /// The kind, see [`descriptor`].
        kind: u8,
        /// Length of the identifier, in bytes.
        length: u8,
        /// Zero.
        reserved: [u8; 2],
    }
);

/// Kinds of namespace identifier.
pub mod descriptor {
    /// Extended unique identifier: 8 bytes.
    pub const EUI64: u8 = 1;
    /// Globally unique identifier: 16 bytes.
    pub const NGUID: u8 = 2;
    /// UUID: 16 bytes.
    pub const UUID: u8 = 3;
    /// The command set: 1 byte.
    pub const COMMAND_SET: u8 = 4;
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Controller, async_events) == 92);
    assert!(offset_of!(Controller, kind) == 111);
    assert!(offset_of!(Controller, admin_commands) == 256);
    assert!(offset_of!(Controller, keep_alive) == 320);
    assert!(offset_of!(Controller, command_size) == 512);
    assert!(offset_of!(Controller, sgls) == 536);
    assert!(offset_of!(Controller, subsystem) == 768);
    assert!(offset_of!(Controller, command_capsule) == 1792);
    assert!(offset_of!(Controller, fabrics_commands) == 1804);
    assert!(offset_of!(Namespace, deallocated) == 33);
    assert!(offset_of!(Namespace, attributes) == 99);
    assert!(offset_of!(Namespace, nguid) == 104);
    assert!(offset_of!(Namespace, block_formats) == 128);
};
