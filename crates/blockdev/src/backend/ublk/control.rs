//! Control commands of the kernel's ublk driver (`linux/ublk_cmd.h`).

use std::fs::{File, OpenOptions};
use std::io;
use std::path::PathBuf;

use aquifer_page::PAGE_SIZE;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::backend::MAX_REQUEST;
use crate::sys::ublk::{Command, Control, ControlRing};

pub(super) const PATH: &str = "/dev/ublk-control";

/// `UBLK_F_USER_RECOVERY`: when the server dies, requests wait until another server takes over.
const USER_RECOVERY: u64 = 1 << 3;
/// `UBLK_F_CMD_IOCTL_ENCODE`.
const IOCTL_ENCODE: u64 = 1 << 6;

const PARAMETERS_BASIC: u32 = 1;
const PARAMETERS_DISCARD: u32 = 2;
/// `UBLK_ATTR_VOLATILE_CACHE`: the kernel sends flushes.
const VOLATILE_CACHE: u32 = 1 << 2;

/// Asks the driver for any free number.
const ANY: u32 = u32::MAX;

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Info {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pad0: u16,
    pub(super) max_request: u32,
    pub(super) device: u32,
    pub(super) pid: i32,
    pad1: u32,
    flags: u64,
    /// `ublksrv_flags`, which the driver keeps for the server: the mark of the device.
    pub(super) mark: u64,
    owner: [u32; 2],
    reserved: [u64; 2],
}

/// `struct ublk_params`, up to the discard parameters.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Parameters {
    length: u32,
    kinds: u32,
    attributes: u32,
    logical_block_shift: u8,
    physical_block_shift: u8,
    optimal_shift: u8,
    minimal_shift: u8,
    max_sectors: u32,
    chunk_sectors: u32,
    sectors: u64,
    boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    max_discard_sectors: u32,
    max_zeroes_sectors: u32,
    max_discard_segments: u16,
    reserved: [u16; 3],
}

const _: () = assert!(size_of::<Info>() == 64 && size_of::<Parameters>() == 64);

/// The driver's control device.
pub(super) struct Driver {
    ring: ControlRing,
}

impl Driver {
    pub(super) fn open() -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open(PATH)?;
        Ok(Self { ring: ControlRing::new(device)? })
    }

    /// Adds a device without starting it.
    pub(super) fn add(&mut self, queues: u16, depth: u16, mark: u64) -> io::Result<Info> {
        let mut info = Info {
            queues,
            depth,
            max_request: MAX_REQUEST as u32,
            device: ANY,
            pid: std::process::id().cast_signed(),
            flags: USER_RECOVERY | IOCTL_ENCODE,
            mark,
            ..zerocopy::FromZeros::new_zeroed()
        };
        self.ring.call(Control::Add, Command { device: ANY, data: 0 }, info.as_mut_bytes())?;
        Ok(info)
    }

    /// Returns the driver's record of a device.
    pub(super) fn info(&mut self, device: u32) -> io::Result<Info> {
        let mut info: Info = zerocopy::FromZeros::new_zeroed();
        self.ring.call(Control::GetInfo, Command { device, data: 0 }, info.as_mut_bytes())?;
        Ok(info)
    }

    /// Sets the size and the other parameters of a device.
    pub(super) fn set_size(&mut self, device: u32, bytes: u64) -> io::Result<()> {
        let block_shift = PAGE_SIZE.trailing_zeros() as u8;
        let mut parameters = Parameters {
            length: size_of::<Parameters>() as u32,
            kinds: PARAMETERS_BASIC | PARAMETERS_DISCARD,
            attributes: VOLATILE_CACHE,
            logical_block_shift: block_shift,
            physical_block_shift: block_shift,
            optimal_shift: block_shift,
            minimal_shift: block_shift,
            max_sectors: (MAX_REQUEST / 512) as u32,
            chunk_sectors: 0,
            sectors: bytes / 512,
            boundary_mask: 0,
            discard_alignment: 0,
            discard_granularity: PAGE_SIZE as u32,
            max_discard_sectors: u32::MAX >> 9,
            max_zeroes_sectors: u32::MAX >> 9,
            max_discard_segments: 1,
            reserved: [0; 3],
        };
        self.simple(Control::SetParameters, device, 0, parameters.as_mut_bytes())
    }

    /// Creates the block device. Its queues must be served already.
    pub(super) fn start(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Start, device, u64::from(std::process::id()), &mut [])
    }

    /// Removes the block device; its outstanding requests fail.
    pub(super) fn stop(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Stop, device, 0, &mut [])
    }

    /// Deletes the driver's record of the device.
    pub(super) fn delete(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Delete, device, 0, &mut [])
    }

    /// Prepares a device of a dead server for a new one. Fails with `EBUSY` while the driver still
    /// cleans up after the dead server.
    pub(super) fn start_recovery(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::StartRecovery, device, 0, &mut [])
    }

    /// Resumes the device with the queues that this process serves.
    pub(super) fn end_recovery(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::EndRecovery, device, u64::from(std::process::id()), &mut [])
    }

    fn simple(
        &mut self,
        control: Control,
        device: u32,
        data: u64,
        payload: &mut [u8],
    ) -> io::Result<()> {
        self.ring.call(control, Command { device, data }, payload).map(drop)
    }
}

/// Opens the character device through which the queues are served.
pub(super) fn open_queues(device: u32) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/dev/ublkc{device}"))
}

/// Returns the path of the block device.
pub(super) fn node(device: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{device}"))
}
