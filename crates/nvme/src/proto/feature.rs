//! Features, and the asynchronous events that one of them enables.

/// Feature identifiers (Base, Figure 316 "Feature Identifiers").
pub mod id {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power management.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// Temperature threshold.
    pub const TEMPERATURE: u8 = 0x04;
    /// Error recovery.
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// The volatile write cache.
    pub const WRITE_CACHE: u8 = 0x06;
    /// The number of I/O queues: submission queues in the low half, completion queues in the high
    /// one, both minus one.
    pub const QUEUES: u8 = 0x07;
    /// Whether writes are atomic only as far as power failures demand.
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    /// The enabled asynchronous events.
    pub const ASYNC_EVENTS: u8 = 0x0B;
    /// The keep alive timeout, in milliseconds.
    pub const KEEP_ALIVE: u8 = 0x0F;
    /// The host's identifier.
    pub const HOST_ID: u8 = 0x81;
}

/// Bit 31 of dword 10 of Set Features: save the value.
pub const SAVE: u32 = 1 << 31;

/// Asynchronous events (Base, section 5.2 "Asynchronous Event Request command", Figures 142 to
/// 148). From the low byte up: type, information, the log page to read.
pub mod event {
    /// The attributes of a namespace changed.
    pub const NAMESPACE_CHANGED: u32 =
        0x02 | (super::super::log::page::CHANGED_NAMESPACES as u32) << 16;
    /// The discovery log changed.
    pub const DISCOVERY_CHANGED: u32 =
        0x02 | 0xF0 << 8 | (super::super::log::page::DISCOVERY as u32) << 16;
}
