use super::broken::Fatal;
use crate::nvme::proto::pdu::{Data, fatal, flag};
use crate::nvme::proto::{Command, Status};

/// The commands whose data was asked for and is under way. A place for each that the queue can hold; the place's number
/// is the tag by which the host's data names it.
pub(super) struct Transfers {
    places: Box<[Option<Transfer>]>,
    free: Vec<u16>,
}

/// A command whose data is under way.
pub(super) struct Transfer {
    pub(super) command: Command,
    /// Bytes of data.
    pub(super) length: u32,
    /// Bytes that have come.
    pub(super) received: u32,
    /// How the command ends, as far as is known.
    pub(super) status: Status,
    /// What has come, for commands that need it whole.
    pub(super) gathered: Option<Vec<u8>>,
}

impl Transfers {
    /// For a queue of `size` entries.
    pub(super) fn new(size: u32) -> Self {
        let places = (0..size).map(|_| None).collect();
        Self { places, free: (0..size as u16).rev().collect() }
    }

    /// Begins a transfer and says its tag. Allocates only if all is to be `gathered`.
    pub(super) fn begin(
        &mut self,
        command: &Command,
        length: u32,
        gathered: bool,
    ) -> Result<u16, Fatal> {
        let Some(tag) = self.free.pop() else {
            return Err(Fatal::sequence("more commands at a time than the queue has entries"));
        };
        let gathered = gathered.then(|| Vec::with_capacity(length as usize));
        let (command, status) = (*command, Status::SUCCESS);
        self.places[usize::from(tag)] =
            Some(Transfer { command, length, received: 0, status, gathered });
        Ok(tag)
    }

    /// The transfer to which this data belongs, which must be what comes next of it.
    pub(super) fn expect(&mut self, data: &Data) -> Result<&mut Transfer, Fatal> {
        let place = self.places.get_mut(usize::from(data.tag.get())).and_then(Option::as_mut);
        let Some(transfer) = place.filter(|transfer| transfer.command.id == data.command_id) else {
            return Err(Fatal::header(10, "data that nobody asked for"));
        };
        let (offset, length) = (data.offset.get(), data.length.get());
        if offset != transfer.received || length > transfer.length - transfer.received {
            let what = "data outside of what was asked for, or out of order";
            return Err(Fatal::new(fatal::DATA_OUT_OF_RANGE, 12, what));
        }
        if (data.header.flags & flag::LAST != 0) != (offset + length == transfer.length) {
            return Err(Fatal::header(1, "the last data without saying so, or the reverse"));
        }
        if length == 0 {
            return Err(Fatal::header(16, "data of no bytes"));
        }
        Ok(transfer)
    }

    /// Takes the transfer out, if all of its data has come.
    pub(super) fn finish(&mut self, tag: u16) -> Option<Transfer> {
        let place = &mut self.places[usize::from(tag)];
        let finished = place.take_if(|transfer| transfer.received == transfer.length)?;
        // No more than the places there are, for which there is room.
        self.free.push(tag);
        Some(finished)
    }
}
