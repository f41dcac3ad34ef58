//! The handshake: ICReq and ICResp.

use super::link::Link;
use super::parse::Pdu;
use super::{Broken, Fatal, MAX_DATA};
use crate::proto::pdu::{
    CommonHeader, IC_LENGTH, IcResp, MAX_ALIGNMENT, Shape, digests, fatal, kind,
};

/// Agrees with the host on the form of PDUs. Returns false if it closes the connection before an
/// ICReq.
pub(super) fn agree(link: &mut Link) -> Result<bool, Broken> {
    let request = match link.wait_next()? {
        None => return Ok(false),
        Some(Pdu::Request(request)) => request,
        Some(_) => return Err(Fatal::sequence("a first PDU other than ICReq").into()),
    };
    if request.format.get() != 0 {
        return Err(Fatal::new(fatal::UNSUPPORTED, 8, "an unknown format of PDUs").into());
    }
    if request.alignment > MAX_ALIGNMENT {
        return Err(Fatal::header(10, "an unknown alignment of data").into());
    }
    let digests = request.digests & (digests::HEADER | digests::DATA);
    link.send(&IcResp {
        header: CommonHeader::bare(kind::IC_RESP, IC_LENGTH),
        format: 0.into(),
        alignment: 0,
        digests,
        max_data: (MAX_DATA as u32).into(),
        reserved: [0; 112],
    })?;
    link.agree(Shape::new(digests, 0), Shape::new(digests, request.alignment));
    Ok(true)
}
