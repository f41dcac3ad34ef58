//! Conversion between the messages of the API and those of the controller.

use aquifer_api::message::{Leaving, MemBorAck, MemBorFin, MemBorRej, MemBorReq, MemLenFin};
use aquifer_api::{Done, client::CallError, client::Client, path};
use aquifer_control::{Message, Reason, RequestId};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StrDeserializer};

/// A peer's message in the form of the API.
#[derive(Clone, Debug)]
pub enum Heard {
    /// `mem_bor_req`.
    Req(MemBorReq),
    /// `mem_bor_ack`.
    Ack(MemBorAck),
    /// `mem_bor_rej`.
    Rej(MemBorRej),
    /// `mem_bor_fin`.
    BorFin(MemBorFin),
}

impl TryFrom<Heard> for Message {
    /// The malformed part.
    type Error = String;

    fn try_from(heard: Heard) -> Result<Self, String> {
        let id = |text: String| RequestId::try_from(text).map_err(|error| error.to_string());
        Ok(match heard {
            Heard::Req(MemBorReq { request, bytes, group }) => {
                Self::MemBorReq { request: id(request)?, bytes, group }
            }
            Heard::Ack(MemBorAck { request, lease, bytes, uris }) => {
                Self::MemBorAck { request: id(request)?, lease, bytes, uris }
            }
            Heard::Rej(MemBorRej { request, spare, reason }) => {
                let named: StrDeserializer<'_, Error> = reason.as_str().into_deserializer();
                let reason = Reason::deserialize(named)
                    .map_err(|error| format!("invalid reason: {error}"))?;
                Self::MemBorRej { request: id(request)?, spare, reason }
            }
            Heard::BorFin(MemBorFin { lease }) => Self::MemBorFin { lease },
        })
    }
}

/// Sends `message` to the agent behind `client`; returns once the agent has taken it in. For
/// `mem_len_fin` the result says why the last attempt to leave the lease failed, if one did.
pub async fn say(client: &Client, message: &Message) -> Result<Option<String>, CallError> {
    let done = |_: Done| None;
    match message.clone() {
        Message::MemBorReq { request, bytes, group } => {
            let request = MemBorReq { request: request.into(), bytes, group };
            client.post(path::MEM_BOR_REQ, &request).await.map(done)
        }
        Message::MemBorAck { request, lease, bytes, uris } => {
            let ack = MemBorAck { request: request.into(), lease, bytes, uris };
            client.post(path::MEM_BOR_ACK, &ack).await.map(done)
        }
        Message::MemBorRej { request, spare, reason } => {
            let reason =
                serde_json::to_value(reason).ok().and_then(|v| v.as_str().map(str::to_owned));
            let reason = reason.unwrap_or_default();
            let rej = MemBorRej { request: request.into(), spare, reason };
            client.post(path::MEM_BOR_REJ, &rej).await.map(done)
        }
        Message::MemBorFin { lease } => {
            client.post(path::MEM_BOR_FIN, &MemBorFin { lease }).await.map(done)
        }
        Message::MemLenFin { lease } => {
            let leaving: Leaving = client.post(path::MEM_LEN_FIN, &MemLenFin { lease }).await?;
            Ok(leaving.failed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_is_none_is_told_to_the_sender() {
        let rej = |reason: &str| MemBorRej {
            request: RequestId(1).to_string(),
            spare: Default::default(),
            reason: reason.to_owned(),
        };
        let message = Message::try_from(Heard::Rej(rej("no_room")));
        assert!(
            matches!(message, Ok(Message::MemBorRej { reason: Reason::NoRoom, .. })),
            "{message:?}"
        );
        assert!(Message::try_from(Heard::Rej(rej("mood"))).unwrap_err().contains("mood"));
    }

    #[test]
    fn a_malformed_request_id_is_told_to_the_sender() {
        let req = MemBorReq {
            request: "1".to_owned(),
            bytes: Default::default(),
            group: Default::default(),
        };
        assert!(Message::try_from(Heard::Req(req)).unwrap_err().contains("request id"));
    }
}
