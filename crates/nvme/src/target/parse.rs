//! The parser of received PDUs.

use zerocopy::FromBytes;
use zerocopy::byteorder::little_endian::U32;

use super::broken::{Broken, Fatal};
use super::{MAX_DATA, MAX_IN_CAPSULE};
use crate::proto::pdu::{
    CapsuleCmd, CommonHeader, Data, IC_LENGTH, IcReq, Shape, TERM_DATA, TermReq, fatal, kind,
};
use crate::proto::{Command, digest};

/// A PDU from the host.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pdu {
    Request(IcReq),
    Command(Command, Payload),
    Data(Data, Payload),
}

/// The place of the data in a PDU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Payload {
    pub(super) start: usize,
    pub(super) length: usize,
    /// Whether the digest is right or absent.
    pub(super) intact: bool,
}

/// Returns the first PDU of `bytes` and its length, if it has arrived completely. Reports an error
/// in its common header without waiting for the rest.
pub(super) fn first(bytes: &[u8], shape: Shape) -> Result<Option<(Pdu, usize)>, Broken> {
    let Ok((header, _)) = CommonHeader::read_from_prefix(bytes) else { return Ok(None) };
    let payload = check(&header, shape)?;
    let length = header.length.get() as usize;
    let Some(bytes) = bytes.get(..length) else { return Ok(None) };
    let pdu = match header.kind {
        kind::IC_REQ => Pdu::Request(read(bytes)?),
        kind::H2C_TERM_REQ => return Err(Broken::Terminated(read(bytes)?)),
        _ => {
            let header_length = usize::from(header.header_length);
            if shape.header_digest {
                check_header_digest(bytes, header_length)?;
            }
            let payload = Payload { intact: is_intact(bytes, payload, shape), ..payload };
            if header.kind == kind::CAPSULE_CMD {
                Pdu::Command(read::<CapsuleCmd>(bytes)?.command, payload)
            } else {
                let data: Data = read(bytes)?;
                if data.length.get() as usize != payload.length {
                    return Err(Fatal::header(
                        16,
                        "a data PDU whose length differs from its data's",
                    )
                    .into());
                }
                Pdu::Data(data, payload)
            }
        }
    };
    Ok(Some((pdu, length)))
}

/// Checks the common header and finds the data.
fn check(header: &CommonHeader, shape: Shape) -> Result<Payload, Fatal> {
    let (header_length, most_data) = match header.kind {
        kind::IC_REQ => (IC_LENGTH, 0),
        kind::H2C_TERM_REQ => (size_of::<TermReq>(), TERM_DATA),
        kind::CAPSULE_CMD => (size_of::<CapsuleCmd>(), MAX_IN_CAPSULE),
        kind::H2C_DATA => (size_of::<Data>(), MAX_DATA),
        kind::IC_RESP | kind::C2H_TERM_REQ | kind::CAPSULE_RESP | kind::C2H_DATA | kind::R2T => {
            return Err(Fatal::header(0, "a PDU that only controllers send"));
        }
        _ => return Err(Fatal::header(0, "a PDU of an unknown type")),
    };
    let length = header.length.get() as usize;
    if matches!(header.kind, kind::IC_REQ | kind::H2C_TERM_REQ) {
        if usize::from(header.header_length) != header_length {
            return Err(Fatal::header(2, "a PDU with a wrong length of its header"));
        }
        // Neither PDU has digests, and a termination's data is for debugging only.
        let allowed = header_length..=header_length + most_data;
        return match allowed.contains(&length) {
            true => Ok(Payload::default()),
            false => Err(Fatal::header(4, "a PDU with a wrong length")),
        };
    }
    let data = shape.payload(header, header_length, most_data)?;
    Ok(Payload { start: data.start, length: data.length, intact: true })
}

fn check_header_digest(bytes: &[u8], header_length: usize) -> Result<(), Fatal> {
    let (header, rest) = bytes.split_at(header_length);
    let there = U32::read_from_prefix(rest).map_or(U32::ZERO, |(there, _)| there);
    if there == digest::of(header) {
        return Ok(());
    }
    Err(Fatal::new(fatal::HEADER_DIGEST, there.get(), "a header with a wrong digest"))
}

fn is_intact(bytes: &[u8], payload: Payload, shape: Shape) -> bool {
    if !shape.data_digest || payload.length == 0 {
        return true;
    }
    let (data, rest) = bytes[payload.start..].split_at(payload.length);
    U32::read_from_prefix(rest).is_ok_and(|(there, _)| there == digest::of(data))
}

/// Reads a structure at the start of a PDU.
fn read<T: FromBytes>(bytes: &[u8]) -> Result<T, Fatal> {
    match T::read_from_prefix(bytes) {
        Ok((value, _)) => Ok(value),
        Err(_) => Err(Fatal::header(4, "a PDU that is too short")),
    }
}
