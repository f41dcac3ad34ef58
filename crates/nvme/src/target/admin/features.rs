//! Features: Get Features and Set Features.

use std::time::Duration;

use super::{AdminQueue, Answer};
use crate::proto::feature::{SAVE, id};
use crate::proto::{Command, NvmeStatus};
use crate::target::data::sink;

/// Bit 0 of dword 11 of the host identifier feature: the identifier has 16 bytes.
const LONG_HOST_ID: u32 = 1;

impl AdminQueue<'_> {
    /// Returns the value in the completion, or as data if it does not fit there (Base, section 5.15
    /// "Get Features command").
    pub(super) fn get_feature(&self, command: &Command) -> Result<Answer, NvmeStatus> {
        let feature = command.dword(10) as u8;
        let io = !self.controller.is_discovery();
        let value = match feature {
            id::KEEP_ALIVE => self.keep_alive.map_or(0, |time| time.as_millis() as u64),
            id::ASYNC_EVENTS => self.events.wanted.into(),
            id::QUEUES if io => self.queues(),
            id::HOST_ID if io => {
                if command.dword(11) & LONG_HOST_ID == 0 {
                    return Err(NvmeStatus::INVALID_FIELD.final_());
                }
                sink(command, self.controller.host.id.len())?;
                return Ok(Answer::Data(self.controller.host.id.to_vec()));
            }
            _ if io && is_fixed(feature) => 0,
            _ => return Err(NvmeStatus::INVALID_FIELD.final_()),
        };
        Ok(Answer::Result(value))
    }

    /// Sets a feature; no value can be saved (Base, section 5.27 "Set Features command").
    pub(super) fn set_feature(&mut self, command: &Command) -> Result<Answer, NvmeStatus> {
        let (feature, value) = (command.dword(10) as u8, command.dword(11));
        let io = !self.controller.is_discovery();
        if command.dword(10) & SAVE != 0 {
            return Err(NvmeStatus::FEATURE_NOT_SAVEABLE.final_());
        }
        match feature {
            id::KEEP_ALIVE => {
                self.keep_alive = (value > 0).then(|| Duration::from_millis(value.into()));
                Ok(Answer::Result(0))
            }
            id::ASYNC_EVENTS => {
                self.events.wanted = value;
                Ok(Answer::Result(0))
            }
            // The largest valid number of queues is 65535 (field value 65534).
            id::QUEUES if io && (value & 0xFFFF == 0xFFFF || value >> 16 == 0xFFFF) => {
                Err(NvmeStatus::INVALID_FIELD.final_())
            }
            // Grants all queues, regardless of the number requested.
            id::QUEUES if io => Ok(Answer::Result(self.queues())),
            // Connect has already set it.
            id::HOST_ID if io => Err(NvmeStatus::COMMAND_SEQUENCE.final_()),
            _ if io && is_fixed(feature) => Err(NvmeStatus::FEATURE_NOT_CHANGEABLE.final_()),
            _ => Err(NvmeStatus::INVALID_FIELD.final_()),
        }
    }

    /// Returns the number of I/O queues in the form of the feature.
    fn queues(&self) -> u64 {
        let most = u64::from(self.service.core.limits.queues) - 1;
        most | most << 16
    }
}

/// Returns whether the feature is mandatory but has no settings here.
fn is_fixed(feature: u8) -> bool {
    matches!(
        feature,
        id::ARBITRATION
            | id::POWER_MANAGEMENT
            | id::TEMPERATURE
            | id::ERROR_RECOVERY
            | id::WRITE_ATOMICITY
    )
}
