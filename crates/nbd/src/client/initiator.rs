//! An NBD export as a lease.

use std::sync::Arc;
use std::time::Duration;

use aquifer_page::visitor::Visitor;
use aquifer_page::{Bytes, Incarnation};
use aquifer_transport::initiating::Pipelined as _;
use aquifer_transport::initiator::{Connector, Initiator, InitiatorError};

use super::{Connection, Operation, Run, Target};

impl Connector for Target {
    fn connect(
        &self,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Box<dyn Initiator>, InitiatorError> {
        Ok(Box::new(Connection::connect_as(Arc::new(self.clone()), visitor, io_timeout)?))
    }
}

impl Initiator for Connection {
    fn epoch(&self) -> u64 {
        self.agreement.epoch
    }

    fn incarnation(&self) -> Option<Incarnation> {
        Self::incarnation(self)
    }

    fn size(&self) -> Bytes {
        Self::size(self)
    }

    fn is_read_only(&self) -> bool {
        Self::is_read_only(self)
    }

    fn can_multi_conn(&self) -> bool {
        Self::can_multi_conn(self)
    }

    fn can_flush(&self) -> bool {
        Self::can_flush(self)
    }

    fn longest_transfer(&self) -> Bytes {
        self.max_payload()
    }

    fn set_io_timeout(&mut self, io_timeout: Duration) {
        Self::set_io_timeout(self, io_timeout);
    }

    fn hole(&mut self, offset: u64, length: u32) -> Result<u64, InitiatorError> {
        if !self.knows_holes() {
            return Ok(0);
        }
        let mut runs: Vec<Run> = Vec::new();
        self.block_status(offset, length, &mut runs)?;
        Ok(runs.iter().take_while(|run| run.hole).map(|run| u64::from(run.length)).sum())
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), InitiatorError> {
        Ok(Self::read(self, offset, into)?)
    }

    fn read_soon(
        &mut self,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, InitiatorError> {
        Ok(self.read_page_soon(offset, into, soon)?)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), InitiatorError> {
        Ok(Self::write(self, offset, from)?)
    }

    fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<bool, InitiatorError> {
        if !self.can_write_zeroes() {
            return Ok(false);
        }
        match Self::write_zeroes(self, offset, length) {
            Err(error) if error.ends_connection() => Err(error.into()),
            done => Ok(done.is_ok()),
        }
    }

    fn flush(&mut self) -> Result<(), InitiatorError> {
        Ok(Self::flush(self)?)
    }

    fn transfer(
        &mut self,
        operations: &mut [Operation<'_>],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), InitiatorError> {
        Ok(self.run_while(operations, meanwhile)?)
    }
}
