//! The commands that wait for requested data.

use super::broken::Fatal;
use crate::proto::pdu::{Data, fatal, flag};
use crate::proto::{Command, NvmeStatus};

/// The commands in flight with requested data. There is a place for each command that the queue can
/// hold; its number is the tag that the host's data carries.
pub(super) struct Transfers {
    places: Box<[Option<Transfer>]>,
    free: Vec<u16>,
}

/// A command that waits for its data.
pub(super) struct Transfer {
    pub(super) command: Command,
    /// Length of the data, in bytes.
    pub(super) length: u32,
    /// Bytes received so far.
    pub(super) received: u32,
    /// The command's status so far.
    pub(super) status: NvmeStatus,
    /// The data received, for commands that need all of it at once.
    pub(super) gathered: Option<Vec<u8>>,
}

impl Transfers {
    /// Makes the places of a queue of `size` entries.
    pub(super) fn new(size: u32) -> Self {
        let places = (0..size).map(|_| None).collect();
        Self { places, free: (0..size as u16).rev().collect() }
    }

    /// Begins a transfer and returns its tag. Allocates only with `gathered`, which collects all
    /// data.
    pub(super) fn begin(
        &mut self,
        command: &Command,
        length: u32,
        gathered: bool,
    ) -> Result<u16, Fatal> {
        let Some(tag) = self.free.pop() else {
            return Err(Fatal::sequence("more commands in flight than the queue has entries"));
        };
        let gathered = gathered.then(|| Vec::with_capacity(length as usize));
        let (command, status) = (*command, NvmeStatus::SUCCESS);
        self.places[usize::from(tag)] =
            Some(Transfer { command, length, received: 0, status, gathered });
        Ok(tag)
    }

    /// Returns the transfer of this data, which must be the next in order.
    pub(super) fn expect(&mut self, data: &Data) -> Result<&mut Transfer, Fatal> {
        let place = self.places.get_mut(usize::from(data.tag.get())).and_then(Option::as_mut);
        let Some(transfer) = place.filter(|transfer| transfer.command.id == data.command_id) else {
            return Err(Fatal::header(10, "data that no command requested"));
        };
        let (offset, length) = (data.offset.get(), data.length.get());
        if offset != transfer.received || length > transfer.length - transfer.received {
            let what = "data outside of the request, or out of order";
            return Err(Fatal::new(fatal::DATA_OUT_OF_RANGE, 12, what));
        }
        if (data.header.flags & flag::LAST != 0) != (offset + length == transfer.length) {
            return Err(Fatal::header(1, "a wrong LAST flag on data"));
        }
        if length == 0 {
            return Err(Fatal::header(16, "a data PDU without data"));
        }
        Ok(transfer)
    }

    /// Removes and returns the transfer, if all its data has arrived.
    pub(super) fn finish(&mut self, tag: u16) -> Option<Transfer> {
        let place = &mut self.places[usize::from(tag)];
        let finished = place.take_if(|transfer| transfer.received == transfer.length)?;
        // Needs no allocation: `free` has the capacity for all places.
        self.free.push(tag);
        Some(finished)
    }
}
