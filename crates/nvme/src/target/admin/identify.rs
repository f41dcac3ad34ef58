//! Identify.

use aquifer_page::{LeaseId, PAGE_SIZE};
use zerocopy::{FromZeros, IntoBytes};

use super::events::REQUESTS;
use super::{AdminQueue, logs};
use crate::proto::fabrics::VERSION_2_0;
use crate::proto::identify::{
    ALL_NAMESPACES, CSI_NVM, Controller, Descriptor, IndependentNamespace, LENGTH, MODEL,
    Namespace, NvmController, controller, descriptor, namespace, what,
};
use crate::proto::{Command, NvmeStatus};
use crate::target::data::sink;
use crate::target::{self, MAX_IN_CAPSULE, MAX_QUEUE, MAX_TRANSFER_SHIFT, NSID};

/// Unit of capsule sizes, in bytes.
const CAPSULE_UNIT: usize = 16;
/// Log 2 of the most blocks of a Write Zeroes; a block has the size of a page.
const WRITE_ZEROES_SHIFT: u8 = 16;
/// The model number of controllers that serve discovery.
const DISCOVERY_MODEL: &str = "Aquifer discovery";

impl AdminQueue<'_> {
    /// Returns the structure that an Identify command asks for.
    pub(super) fn identify(&self, command: &Command) -> Result<Vec<u8>, NvmeStatus> {
        sink(command, LENGTH)?;
        let (wanted, set) = (command.dword(10) as u8, (command.dword(11) >> 24) as u8);
        let Some(namespace) = &self.controller.namespace else {
            return match wanted {
                what::CONTROLLER => Ok(self.controller().as_bytes().to_vec()),
                _ => Err(NvmeStatus::INVALID_FIELD.final_()),
            };
        };
        let of_set = matches!(
            wanted,
            what::NAMESPACE_OF_SET | what::CONTROLLER_OF_SET | what::ACTIVE_NAMESPACES_OF_SET
        );
        if of_set && set != CSI_NVM {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        let nsid = command.nsid.get();
        let needs_namespace = matches!(
            wanted,
            what::NAMESPACE
                | what::DESCRIPTORS
                | what::NAMESPACE_OF_SET
                | what::NAMESPACE_INDEPENDENT
        );
        if needs_namespace && nsid != NSID {
            return Err(NvmeStatus::INVALID_NAMESPACE.final_());
        }
        Ok(match wanted {
            what::CONTROLLER => self.controller().as_bytes().to_vec(),
            what::NAMESPACE => describe(namespace).as_bytes().to_vec(),
            what::ACTIVE_NAMESPACES | what::ACTIVE_NAMESPACES_OF_SET => active_after(nsid)?,
            what::DESCRIPTORS => descriptors(namespace.lease().id()),
            // All zero: the command set adds no protection and no metadata.
            what::NAMESPACE_OF_SET => vec![0; LENGTH],
            what::CONTROLLER_OF_SET => nvm_controller().as_bytes().to_vec(),
            what::NAMESPACE_INDEPENDENT => independent().as_bytes().to_vec(),
            what::COMMAND_SETS => {
                // The only combination: the NVM command set alone.
                let mut combinations = vec![0; LENGTH];
                combinations[0] = 1 << CSI_NVM;
                combinations
            }
            _ => return Err(NvmeStatus::INVALID_FIELD.final_()),
        })
    }

    fn controller(&self) -> Controller {
        let mut answer = Controller::new_zeroed();
        let ours = &self.controller;
        fill_text(&mut answer.revision, logs::REVISION);
        answer.multipath = controller::MULTIPLE;
        answer.max_transfer = MAX_TRANSFER_SHIFT;
        answer.id = ours.id.into();
        answer.version = VERSION_2_0.into();
        answer.attributes = (controller::LONG_HOST_ID | controller::TRAFFIC_KEEPS_ALIVE).into();
        answer.async_limit = (REQUESTS - 1) as u8;
        answer.log_pages = controller::LOG_OFFSETS;
        answer.keep_alive = 10.into();
        answer.max_commands = (MAX_QUEUE as u16).into();
        answer.sgls = (controller::SGLS | controller::SGL_IN_CAPSULE).into();
        answer.subsystem = ours.subsystem.to_field();
        let Some(namespace) = &ours.namespace else {
            fill_text(&mut answer.serial, "");
            fill_text(&mut answer.model, DISCOVERY_MODEL);
            answer.kind = controller::DISCOVERY;
            answer.async_events = controller::DISCOVERY_LOG_NOTICES.into();
            return answer;
        };
        fill_text(&mut answer.serial, &namespace.lease().id().to_string());
        fill_text(&mut answer.model, MODEL);
        answer.kind = controller::IO;
        answer.async_events = controller::NAMESPACE_ATTRIBUTE_NOTICES.into();
        answer.abort_limit = 3;
        answer.firmware = controller::ONE_FIXED_FIRMWARE;
        answer.log_pages |= controller::LOG_EFFECTS;
        answer.command_size = 0x66;
        answer.completion_size = 0x44;
        answer.namespaces = NSID.into();
        answer.max_namespaces = NSID.into();
        answer.commands =
            (controller::COMPARE | controller::DATASET_MANAGEMENT | controller::WRITE_ZEROES)
                .into();
        answer.write_cache = controller::NO_WRITE_CACHE | controller::FLUSH_ALL;
        answer.command_capsule =
            (((size_of::<Command>() + MAX_IN_CAPSULE) / CAPSULE_UNIT) as u32).into();
        answer.response_capsule = 1.into();
        answer.max_descriptors = 1;
        answer.fabrics_commands = controller::DISCONNECT.into();
        answer
    }
}

fn describe(namespace: &target::Namespace) -> Namespace {
    let mut answer = Namespace::new_zeroed();
    let blocks = namespace.size().pages();
    answer.size = blocks.into();
    answer.capacity = blocks.into();
    answer.used = namespace.lease().stored().pages().min(blocks).into();
    answer.features = namespace::THIN;
    answer.sharing = namespace::SHARED;
    answer.deallocated = namespace::READS_ZEROES | namespace::WRITE_ZEROES_DEALLOCATES;
    answer.block_formats[0].data = PAGE_SIZE.trailing_zeros() as u8;
    answer
}

fn independent() -> IndependentNamespace {
    let mut answer = IndependentNamespace::new_zeroed();
    answer.features = namespace::THIN;
    answer.sharing = namespace::SHARED;
    answer.status = namespace::READY;
    answer
}

fn nvm_controller() -> NvmController {
    let mut answer = NvmController::new_zeroed();
    answer.write_zeroes_limit = WRITE_ZEROES_SHIFT;
    answer
}

/// Returns the list of active namespaces with identifiers above `nsid`.
fn active_after(nsid: u32) -> Result<Vec<u8>, NvmeStatus> {
    if nsid >= ALL_NAMESPACES - 1 {
        return Err(NvmeStatus::INVALID_NAMESPACE.final_());
    }
    let mut list = vec![0; LENGTH];
    if nsid < NSID {
        list[..4].copy_from_slice(&NSID.to_le_bytes());
    }
    Ok(list)
}

/// Returns the descriptors of the lease's id, as a UUID, and of the command set.
fn descriptors(lease: LeaseId) -> Vec<u8> {
    let head = |kind, length| Descriptor { kind, length, reserved: [0; 2] };
    let mut list = head(descriptor::UUID, 16).as_bytes().to_vec();
    // A UUID is big-endian on the wire, unlike the fields around it.
    list.extend(lease.0.to_be_bytes());
    list.extend(head(descriptor::COMMAND_SET, 1).as_bytes());
    list.push(CSI_NVM);
    list.resize(LENGTH, 0);
    list
}

/// Writes text into a field, padded with spaces and cut if it is too long.
pub(super) fn fill_text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    let length = text.len().min(field.len());
    field[..length].copy_from_slice(&text.as_bytes()[..length]);
}
