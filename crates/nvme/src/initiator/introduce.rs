//! The introduction of this host's owner to a controller of ours.

use aquifer_page::visitor::Visitor;
use zerocopy::IntoBytes;

use super::Failure;
use super::execute::Executor;
use crate::proto::command::{Sgl, admin};
use crate::proto::introduction::{Introduction, REFUSAL_LENGTH, from_field};
use crate::proto::{Command, NvmeStatus};

/// Introduces the visitor. Once the controller has accepted the introduction, the target carries
/// out no command sent to controllers of an earlier epoch.
pub(super) fn introduce(executor: &mut Executor<'_>, visitor: &Visitor) -> Result<(), Failure> {
    let introduction = Introduction::of(visitor);
    let sgl = Sgl::in_capsule(size_of::<Introduction>() as u32);
    let command = Command::new(admin::INTRODUCE, 0, 0, sgl);
    let (completion, _) = executor.execute(command, introduction.as_bytes(), &mut [])?;
    match NvmeStatus(completion.status().code()) {
        // Older targets of ours do not know the command, and do without.
        NvmeStatus::SUCCESS | NvmeStatus::INVALID_OPCODE => Ok(()),
        NvmeStatus::CLAIMED => Err(Failure::Claimed(refusal(executor)?)),
        NvmeStatus::NOT_NOW => Err(Failure::Refused(refusal(executor)?)),
        _ => Err(Failure::from_status(completion.status())),
    }
}

/// Fetches the target's reason for the refusal, as text.
fn refusal(executor: &mut Executor<'_>) -> Result<String, Failure> {
    let mut text = [0; REFUSAL_LENGTH];
    let command = Command::new(admin::REFUSAL, 0, 0, Sgl::transport(REFUSAL_LENGTH as u32));
    let (completion, length) = executor.execute(command, &[], &mut text)?;
    Ok(if completion.status().is_success() { from_field(&text[..length]) } else { String::new() })
}
