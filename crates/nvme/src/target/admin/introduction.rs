//! Introductions: admission of a host's owner to the lease.

use aquifer_page::visitor::Denied;
use zerocopy::FromBytes;

use super::{AdminQueue, Answer};
use crate::proto::introduction::{Introduction, REFUSAL_LENGTH, to_field};
use crate::proto::{Command, NvmeStatus};
use crate::target::data::{Source, sink, source};
use crate::target::parse::Payload;

impl AdminQueue<'_> {
    /// Admits the host to the lease once the earlier controllers that must end have ended. On a
    /// denial, keeps the reason for [`tell_refusal`](Self::tell_refusal).
    pub(super) fn introduce(
        &mut self,
        command: &Command,
        payload: Payload,
    ) -> Result<Answer, NvmeStatus> {
        let Source::Here(payload) = source(command, payload, size_of::<Introduction>())? else {
            return Err(NvmeStatus::SGL_TYPE_INVALID.final_());
        };
        let introduction = Introduction::read_from_bytes(self.link.data(payload));
        let visitor = introduction.map_err(|_| NvmeStatus::DATA_LENGTH_INVALID.final_())?.visitor();
        let Some(namespace) = &self.controller.namespace else {
            return Err(NvmeStatus::INVALID_OPCODE.final_());
        };
        if self.controller.is_introduced() {
            return Err(NvmeStatus::COMMAND_SEQUENCE.final_());
        }
        let end = (self.end)().map_err(|_| NvmeStatus::INTERNAL_ERROR)?;
        let lease = namespace.lease();
        match lease.admit(&visitor, end) {
            Ok(stay) => {
                self.controller.keep(stay);
                Ok(Answer::Result(0))
            }
            Err(denied) => {
                let (host, name, lease) = (&self.controller.host, &visitor.name, lease.id());
                tracing::warn!(%lease, "refused {name} ({host}): {denied}");
                self.refusal = denied.to_string();
                Err(match denied {
                    Denied::Claimed(_) => NvmeStatus::CLAIMED.final_(),
                    Denied::Late(_) | Denied::Busy(_) | Denied::Unrecorded(_) => {
                        NvmeStatus::NOT_NOW
                    }
                })
            }
        }
    }

    /// Returns the reason why the last introduction was refused.
    pub(super) fn tell_refusal(&self, command: &Command) -> Result<Vec<u8>, NvmeStatus> {
        sink(command, REFUSAL_LENGTH)?;
        Ok(to_field::<REFUSAL_LENGTH>(&self.refusal).to_vec())
    }
}
