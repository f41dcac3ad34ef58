use std::fs::{File, OpenOptions};
use std::io;
use std::path::PathBuf;

use aquifer_page::PAGE_SIZE;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::backend::MAX_REQUEST;
use crate::sys::ublk::{Command, Control, ControlRing};

pub(super) const PATH: &str = "/dev/ublk-control";

/// `UBLK_F_USER_RECOVERY`: requests wait when the server dies, until another one takes the device over.
const USER_RECOVERY: u64 = 1 << 3;
/// `UBLK_F_CMD_IOCTL_ENCODE`.
const IOCTL_ENCODE: u64 = 1 << 6;

const PARAMETERS_BASIC: u32 = 1;
const PARAMETERS_DISCARD: u32 = 2;
/// `UBLK_ATTR_VOLATILE_CACHE`: send flushes.
const VOLATILE_CACHE: u32 = 1 << 2;

/// Any free number.
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
    /// Kept by the driver for the server's use: what the device is marked with.
    pub(super) mark: u64,
    owner: [u32; 2],
    reserved: [u64; 2],
}

/// `struct ublk_params`, as far as used.
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

    /// Makes a device that is not started yet.
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

    /// The state of a device.
    pub(super) fn info(&mut self, device: u32) -> io::Result<Info> {
        let mut info: Info = zerocopy::FromZeros::new_zeroed();
        self.ring.call(Control::GetInfo, Command { device, data: 0 }, info.as_mut_bytes())?;
        Ok(info)
    }

    /// Says how large a device is and what it can do.
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

    /// Makes the block device; its queues must be served already.
    pub(super) fn start(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Start, device, u64::from(std::process::id()), &mut [])
    }

    /// Removes the block device; what it still has to do fails.
    pub(super) fn stop(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Stop, device, 0, &mut [])
    }

    /// Forgets the device.
    pub(super) fn delete(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::Delete, device, 0, &mut [])
    }

    /// Prepares a device whose server has died for a new one; `EBUSY` while the driver is not done with the dead one.
    pub(super) fn start_recovery(&mut self, device: u32) -> io::Result<()> {
        self.simple(Control::StartRecovery, device, 0, &mut [])
    }

    /// Goes on with the queues that are served now.
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

/// Opens the device by which its queues are served.
pub(super) fn open_queues(device: u32) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/dev/ublkc{device}"))
}

/// The block device's node.
pub(super) fn node(device: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{device}"))
}
