//! The sending of the controller's messages to a peer.

use aquifer_api::message::{Leaving, MemBorAck, MemBorFin, MemBorRej, MemBorReq, MemLenFin};
use aquifer_api::{Done, client::CallError, client::Client, path};
use aquifer_control::Message;

/// Sends `message` to the agent behind `client`; returns once the agent has taken it in. For
/// `mem_len_fin` the result says why the last attempt to leave the lease failed, if one did.
pub async fn say(client: &Client, message: Message) -> Result<Option<String>, CallError> {
    let done = match message {
        Message::MemBorReq { request, bytes, owner, group, goes_first } => {
            let req = MemBorReq { request, bytes, region: owner.into(), group, goes_first };
            client.post(path::MEM_BOR_REQ, &req).await
        }
        Message::MemBorAck { request, lease, bytes, uris, generation } => {
            let ack = MemBorAck { request, lease, bytes, uris, generation };
            client.post(path::MEM_BOR_ACK, &ack).await
        }
        Message::MemBorRej { request, spare, reason } => {
            client.post(path::MEM_BOR_REJ, &MemBorRej { request, spare, reason }).await
        }
        Message::MemBorFin { lease, generation } => {
            client.post(path::MEM_BOR_FIN, &MemBorFin { lease, generation }).await
        }
        Message::MemLenFin { lease, generation } => {
            let recall = MemLenFin { lease, generation };
            let leaving: Leaving = client.post(path::MEM_LEN_FIN, &recall).await?;
            return Ok(leaving.failed);
        }
    };
    done.map(|Done {}| None)
}
