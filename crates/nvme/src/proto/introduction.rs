//! Two vendor specific commands by which a host of ours names the owner of the pages in a
//! namespace.
//!
//! Only controllers of our [`MODEL`](super::identify::MODEL) receive these commands. Once an
//! introduction has completed, no queue of an older epoch of the same client carries out a command.

use aquifer_page::visitor::Visitor;
use aquifer_page::{ClientId, OwnerId};
use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U32, U64, U128};

/// Size of the owner's name, in bytes.
const NAME: usize = 208;
/// Size of the answer to [`REFUSAL`](super::command::admin::REFUSAL): text, padded with zeroes.
pub const REFUSAL_LENGTH: usize = 512;

/// Flags of an [`Introduction`].
pub mod flag {
    /// The claim outlives the controller for as long as the namespace stores anything.
    pub const KEEPS: u32 = 1 << 0;
    /// The namespace is to be taken from its present owner, which loses its pages.
    pub const TAKES_OVER: u32 = 1 << 1;
    /// The owner has moved for good: the target ends clients of earlier generations, and refuses
    /// them from then on.
    pub const ENDS_OLDER: u32 = 1 << 2;
}

layout!(
    /// The data of [`INTRODUCE`](super::command::admin::INTRODUCE).
    Introduction, 256 {
        /// The owner of the pages in the namespace.
        owner: U128,
        /// The process that connects.
        client: U128,
        /// Number of the client's reconnections; controllers of the client with a smaller one end.
        epoch: U64,
        /// Number of the owner's moves to other hosts.
        generation: U32,
        /// Flags, see [`flag`].
        flags: U32,
        /// The operators' name for the owner: text, padded with zeroes.
        name: [u8; NAME],
    }
);

impl Introduction {
    /// Makes the introduction of a visitor. Cuts a name that is too long.
    pub fn of(visitor: &Visitor) -> Self {
        let keeps = if visitor.keeps { flag::KEEPS } else { 0 };
        let takes_over = if visitor.takes_over { flag::TAKES_OVER } else { 0 };
        let ends_older = if visitor.ends_older { flag::ENDS_OLDER } else { 0 };
        Self {
            owner: visitor.owner.0.into(),
            client: visitor.client.0.into(),
            epoch: visitor.epoch.into(),
            generation: visitor.generation.into(),
            flags: (keeps | takes_over | ends_older).into(),
            name: to_field(&visitor.name),
        }
    }

    /// Returns the visitor that it introduces.
    pub fn visitor(&self) -> Visitor {
        let has = |flag| self.flags.get() & flag != 0;
        Visitor {
            owner: OwnerId(self.owner.get()),
            name: from_field(&self.name),
            generation: self.generation.get(),
            ends_older: has(flag::ENDS_OLDER),
            client: ClientId(self.client.get()),
            epoch: self.epoch.get(),
            keeps: has(flag::KEEPS),
            takes_over: has(flag::TAKES_OVER),
        }
    }
}

/// Returns text as a field padded with zeroes; cuts text that is too long, between characters.
pub fn to_field<const LENGTH: usize>(text: &str) -> [u8; LENGTH] {
    let mut field = [0; LENGTH];
    let fits = |at: &usize| text.is_char_boundary(*at);
    let length = (0..=text.len().min(LENGTH)).rev().find(fits).unwrap_or(0);
    field[..length].copy_from_slice(&text.as_bytes()[..length]);
    field
}

/// Returns text of the peer without control characters, fit for a log.
pub fn from_field(field: &[u8]) -> String {
    String::from_utf8_lossy(field).chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_says_what_its_visitor_is() {
        let visitor = Visitor {
            owner: OwnerId(1),
            name: "region 'wéb'".to_owned(),
            generation: 2,
            ends_older: true,
            client: ClientId(3),
            epoch: 4,
            keeps: true,
            takes_over: false,
        };
        assert_eq!(Introduction::of(&visitor).visitor(), visitor);
        let long = Visitor { name: "é".repeat(NAME), takes_over: true, ..visitor };
        let cut = Introduction::of(&long).visitor();
        assert_eq!(cut, Visitor { name: "é".repeat(NAME / 2), ..long });
    }
}
