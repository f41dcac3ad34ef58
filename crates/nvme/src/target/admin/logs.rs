//! Log pages.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;
use aquifer_transport::Address;
use zerocopy::{FromZeros, IntoBytes};

use super::AdminQueue;
use super::identify::fill_text;
use crate::proto::command::{admin, io};
use crate::proto::fabrics::ANY_CONTROLLER;
use crate::proto::log::{
    CHANGED_NAMESPACES, DiscoveryEntry, DiscoveryHeader, Effects, ErrorEntry, FirmwareSlots,
    Request, Smart, discovery, effect, page,
};
use crate::proto::{Command, Nqn, NvmeStatus};
use crate::target::data::sink;
use crate::target::{MAX_QUEUE, MAX_TRANSFER, NSID, Namespace};

/// The firmware revision: the version of this program.
pub(super) const REVISION: &str = env!("CARGO_PKG_VERSION");
/// The unit of the SMART log's data, in bytes.
const SMART_UNIT: u64 = 512 * 1000;

impl AdminQueue<'_> {
    /// Returns the part of a log page that a command asks for.
    ///
    /// The part begins at a multiple of four bytes. Unless the host retains the event that
    /// announced the page, reading clears it (Base, section 5.16 "Get Log Page command").
    pub(super) fn log_page(&mut self, command: &Command) -> Result<Vec<u8>, NvmeStatus> {
        let request = Request::of(command);
        if request.length > MAX_TRANSFER as u64 || !request.offset.is_multiple_of(4) {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        sink(command, request.length as usize)?;
        let page = self.whole_page(&request)?;
        if !request.retain {
            self.events.read(request.page);
        }
        if request.offset > page.len() as u64 {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        let mut part = page[request.offset as usize..].to_vec();
        // Bytes beyond the page read as zeroes.
        part.resize(request.length as usize, 0);
        Ok(part)
    }

    fn whole_page(&mut self, request: &Request) -> Result<Vec<u8>, NvmeStatus> {
        let Some(namespace) = &self.controller.namespace else {
            return match request.page {
                page::SUPPORTED => Ok(supported(&[page::SUPPORTED, page::DISCOVERY])),
                page::DISCOVERY => Ok(self.discovery()),
                _ => Err(NvmeStatus::INVALID_LOG_PAGE.final_()),
            };
        };
        Ok(match request.page {
            page::SUPPORTED => supported(&[
                page::SUPPORTED,
                page::ERROR,
                page::SMART,
                page::FIRMWARE_SLOTS,
                page::CHANGED_NAMESPACES,
                page::EFFECTS,
            ]),
            // Completions report errors; the log keeps none.
            page::ERROR => ErrorEntry::new_zeroed().as_bytes().to_vec(),
            page::SMART => smart(namespace).as_bytes().to_vec(),
            page::FIRMWARE_SLOTS => firmware().as_bytes().to_vec(),
            page::CHANGED_NAMESPACES => {
                let mut list = vec![0; CHANGED_NAMESPACES * 4];
                if self.events.take_namespace_changed(request.retain) {
                    list[..4].copy_from_slice(&NSID.to_le_bytes());
                }
                list
            }
            page::EFFECTS => effects().as_bytes().to_vec(),
            _ => return Err(NvmeStatus::INVALID_LOG_PAGE.final_()),
        })
    }

    /// Returns the subsystems that this host may see, all at the address through which it found
    /// this one.
    fn discovery(&self) -> Vec<u8> {
        let core = &self.service.core;
        let mut header = DiscoveryHeader::new_zeroed();
        header.generation = core.registry.generation().into();
        let mut entries = Vec::new();
        if let Some((ip, port)) = self.address() {
            let subsystems = core.subsystems.list(&self.controller.host);
            header.records = (subsystems.len() as u64).into();
            for subsystem in subsystems {
                entries.extend_from_slice(entry(&subsystem, &ip, port).as_bytes());
            }
        }
        let mut page = header.as_bytes().to_vec();
        page.append(&mut entries);
        page
    }

    /// Returns the address at which hosts reach this target; `None` if that is not an IP address.
    fn address(&self) -> Option<(String, u16)> {
        if let Some(Address::Tcp { host, port }) = &self.service.announced {
            return Some((host.clone(), *port));
        }
        match rustix::net::getsockname(&self.link.socket).map(std::net::SocketAddr::try_from) {
            Ok(Ok(address)) => Some((address.ip().to_canonical().to_string(), address.port())),
            _ => None,
        }
    }
}

fn entry(subsystem: &Nqn, address: &str, port: u16) -> DiscoveryEntry {
    let mut entry = DiscoveryEntry::new_zeroed();
    entry.transport = discovery::TCP;
    entry.family = match address.parse() {
        Ok(IpAddr::V6(_)) => discovery::IPV6,
        _ => discovery::IPV4,
    };
    entry.subsystem_kind = discovery::NVM;
    entry.requirements = discovery::FLOW_CONTROL_OPTIONAL;
    entry.port = 1.into();
    entry.controller_id = ANY_CONTROLLER.into();
    entry.admin_queue = (MAX_QUEUE as u16).into();
    entry.subsystem = subsystem.to_field();
    fill_text(&mut entry.service, &port.to_string());
    fill_text(&mut entry.address, address);
    entry
}

fn supported(pages: &[u8]) -> Vec<u8> {
    let mut bits = vec![0; 1024];
    for &page in pages {
        bits[usize::from(page) * 4] = 1;
    }
    bits
}

fn smart(namespace: &Namespace) -> Smart {
    let mut answer = Smart::new_zeroed();
    let tally = &namespace.tally;
    let data = |blocks: u64| (blocks * PAGE_SIZE as u64).div_ceil(SMART_UNIT);
    answer.spare = 100;
    answer.data_read[0] = data(tally.blocks_read.load(Ordering::Relaxed)).into();
    answer.data_written[0] = data(tally.blocks_written.load(Ordering::Relaxed)).into();
    answer.reads[0] = tally.reads.load(Ordering::Relaxed).into();
    answer.writes[0] = tally.writes.load(Ordering::Relaxed).into();
    answer
}

fn firmware() -> FirmwareSlots {
    let mut answer = FirmwareSlots::new_zeroed();
    answer.active = 1;
    fill_text(&mut answer.revisions[0], REVISION);
    answer
}

fn effects() -> Effects {
    let mut answer = Effects::new_zeroed();
    for opcode in [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
        admin::INTRODUCE,
        admin::REFUSAL,
    ] {
        answer.admin[usize::from(opcode)] = effect::SUPPORTED.into();
    }
    for opcode in [io::FLUSH, io::READ, io::COMPARE] {
        answer.io[usize::from(opcode)] = effect::SUPPORTED.into();
    }
    for opcode in [io::WRITE, io::WRITE_ZEROES, io::DATASET_MANAGEMENT] {
        answer.io[usize::from(opcode)] = (effect::SUPPORTED | effect::CHANGES_CONTENT).into();
    }
    answer
}
