//! Properties of a controller and its namespace, read before their use.

use std::thread;
use std::time::Duration;

use aquifer_page::Incarnation;
use aquifer_page::visitor::Visitor;
use aquifer_transport::initiating::WINDOW;
use zerocopy::FromBytes;

use super::execute::Executor;
use super::introduce::introduce;
use super::{Failure, Target};
use crate::proto::fabrics::{capabilities, configuration, property, status};
use crate::proto::feature::id;
use crate::proto::identify::{
    Controller, Descriptor, LENGTH, MODEL, Namespace, NvmController, controller, descriptor,
    namespace, what,
};
use crate::proto::{Command, NvmeStatus};

/// The memory page that the controller must accept, and the largest block that fits our pages; in
/// bytes.
const PAGE: u64 = aquifer_page::PAGE_SIZE as u64;
/// Limit of a read or write, in bytes, even where the controller accepts more.
const LONGEST: u64 = 1 << 20;
/// The most blocks of one command.
const MOST_BLOCKS: u64 = 1 << 16;
/// The number of I/O queues requested: more than there are workers.
const QUEUES: u32 = 128;
/// Interval between two checks whether the controller is ready.
const LOOK: Duration = Duration::from_millis(5);
/// Unit of capsule sizes in Identify, in bytes.
const CAPSULE_UNIT: u64 = 16;

/// The properties of controller and namespace that the queues need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Size of the namespace in bytes.
    pub(super) size: u64,
    /// Log 2 of the block size in bytes.
    pub(super) block_shift: u32,
    pub(super) limits: Limits,
    /// The optional commands supported, as bits.
    pub(super) commands: u16,
    pub(super) write_cache: bool,
    pub(super) read_only: bool,
    /// No block is allocated, so all blocks read as zeroes.
    pub(super) empty: bool,
    /// Whether the controller supports Keep Alive commands.
    pub(super) keep_alive: bool,
    /// The UUID or NGUID of the namespace, which lasts as long as its blocks; `None` without
    /// either.
    pub(super) incarnation: Option<Incarnation>,
}

/// What a controller accepts at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The longest read or write, in bytes.
    pub(super) transfer: u64,
    /// The longest Write Zeroes, in bytes.
    pub(super) zeroes: u64,
    /// The longest data in a command capsule, in bytes.
    pub(super) in_capsule: u64,
    /// Entries of an I/O queue.
    pub(super) queue_size: u32,
    /// The number of I/O queues granted.
    pub(super) queues: u16,
}

impl Facts {
    /// Returns whether the controller supports this optional command.
    pub(super) fn can(&self, command: u16) -> bool {
        self.commands & command != 0
    }

    /// Returns whether the data of a write of this length fits into the command capsule.
    pub(super) fn fit_capsule(&self, length: usize) -> bool {
        length as u64 <= self.limits.in_capsule
    }

    pub(super) fn block(&self) -> u64 {
        1 << self.block_shift
    }
}

/// Enables the controller and reads its properties. Introduces the visitor to a controller of ours.
pub(super) fn start(
    executor: &mut Executor<'_>,
    target: &Target,
    visitor: Option<&Visitor>,
) -> Result<Facts, Failure> {
    let capabilities = executor.property(property::CAPABILITIES, true)?;
    let min_page = PAGE << (capabilities >> capabilities::MIN_PAGE_SHIFT & 0xF);
    if capabilities & capabilities::NVM == 0 || min_page != PAGE {
        return Err(Failure::Refused(format!(
            "its controller lacks the NVM command set or {PAGE}-byte pages"
        )));
    }
    executor.set_property(property::CONFIGURATION, configuration::START)?;
    wait_ready(executor)?;
    let about: Box<Controller> = known(executor.identify(what::CONTROLLER, 0)?)?;
    if about.kind == controller::DISCOVERY {
        return Err(Failure::Refused(
            "this subsystem has no namespaces: it serves discovery".to_owned(),
        ));
    }
    // Comes first: until then, commands of older connections may change the properties read below.
    if let Some(visitor) = visitor.filter(|_| about.model.trim_ascii_end() == MODEL.as_bytes()) {
        introduce(executor, visitor)?;
    }
    let nsid = target.namespace;
    let missing = |why: String| Failure::Refused(format!("there is no namespace {nsid}: {why}"));
    let disk = match executor.identify::<Namespace>(what::NAMESPACE, nsid)? {
        Ok(disk) if disk.size.get() > 0 => disk,
        Ok(_) => return Err(missing("it is not active".to_owned())),
        Err(status) => return Err(missing(status.to_string())),
    };
    // Controllers before version 2.0 do not have these.
    let of_set: Option<Box<NvmController>> = executor.identify(what::CONTROLLER_OF_SET, 0)?.ok();
    let descriptors = executor.identify::<[u8; LENGTH]>(what::DESCRIPTORS, nsid)?.ok();
    let wanted = (QUEUES - 1) | (QUEUES - 1) << 16;
    let granted = executor.set_feature(id::QUEUES, wanted)?;
    let queues = (granted & 0xFFFF).min(granted >> 16 & 0xFFFF) + 1;
    let block_shift = block_shift(&disk)?;
    let block = 1 << block_shift;
    let longest = |shift: u8| if matches!(shift, 1..32) { PAGE << shift } else { u64::MAX };
    let transfer = longest(about.max_transfer).min(LONGEST).min(MOST_BLOCKS * block);
    let zeroes_shift = of_set.map(|limits| limits.write_zeroes_limit).filter(|shift| *shift != 0);
    let zeroes = longest(zeroes_shift.unwrap_or(about.max_transfer)).min(MOST_BLOCKS * block);
    // The initiator places data only directly behind the command.
    let capsule =
        if about.data_offset.get() == 0 { u64::from(about.command_capsule.get()) } else { 0 };
    let in_capsule = (capsule * CAPSULE_UNIT).saturating_sub(size_of::<Command>() as u64);
    let thin = disk.features & namespace::THIN != 0;
    let reads_zeroes = disk.deallocated & namespace::READS == namespace::READS_ZEROES;
    let size = disk
        .size
        .get()
        .checked_mul(block)
        .ok_or_else(|| missing("it has too many blocks".to_owned()))?;
    let most_entries = (capabilities & capabilities::MAX_QUEUE) as u32 + 1;
    let limits = Limits {
        transfer,
        zeroes,
        in_capsule,
        queue_size: most_entries.clamp(2, 2 * WINDOW as u32),
        queues: queues.min(u64::from(QUEUES)) as u16,
    };
    Ok(Facts {
        size,
        block_shift,
        limits,
        commands: about.commands.get(),
        write_cache: about.write_cache & controller::WRITE_CACHE != 0,
        read_only: disk.attributes & namespace::WRITE_PROTECTED != 0,
        empty: thin && reads_zeroes && disk.used.get() == 0,
        keep_alive: about.keep_alive.get() > 0,
        incarnation: incarnation(&disk, descriptors.as_deref().unwrap_or(&[0; LENGTH])),
    })
}

/// Returns the namespace's UUID or NGUID. Our targets derive the identifier from the incarnation of
/// the lease's pages; other targets assign a new one to a recreated namespace.
fn incarnation(disk: &Namespace, descriptors: &[u8]) -> Option<Incarnation> {
    let mut rest = descriptors;
    let mut found = [[0; 16], disk.nguid];
    while let Ok((head, after)) = Descriptor::read_from_prefix(rest) {
        let Some((id, after)) = after.split_at_checked(head.length.into()) else { break };
        match (head.kind, <[u8; 16]>::try_from(id)) {
            (descriptor::UUID, Ok(id)) => found[0] = id,
            (descriptor::NGUID, Ok(id)) => found[1] = id,
            (0, _) => break,
            _ => {}
        }
        rest = after;
    }
    found.into_iter().map(u128::from_be_bytes).find(|id| *id != 0).map(Incarnation)
}

fn wait_ready(executor: &mut Executor<'_>) -> Result<(), Failure> {
    loop {
        let state = executor.property(property::STATUS, false)? as u32;
        if state & status::FATAL != 0 {
            return Err(Failure::Refused("its controller fails to start".to_owned()));
        }
        if state & status::READY != 0 {
            return Ok(());
        }
        executor.deadline.check()?;
        thread::sleep(LOOK);
    }
}

fn known<T>(answer: Result<T, NvmeStatus>) -> Result<T, Failure> {
    answer.map_err(Failure::from_status)
}

fn block_shift(disk: &Namespace) -> Result<u32, Failure> {
    let number = disk.format & namespace::FORMAT | (disk.format & namespace::FORMAT_HIGH) >> 1;
    let format = disk.block_formats[usize::from(number)];
    if format.metadata.get() != 0 || !(9..=PAGE.trailing_zeros()).contains(&format.data.into()) {
        let why = format!(
            "its blocks have 2^{} bytes and {} of metadata; format it with blocks of 512 to \
             {PAGE} bytes without metadata",
            format.data, format.metadata
        );
        return Err(Failure::Refused(why));
    }
    Ok(format.data.into())
}
