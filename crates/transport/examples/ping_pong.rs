//! A lower bound for the cost of a remote page: a server that answers every 64 bytes with a page.
//!
//! Usage: `ping_pong ADDRESS`; it runs until a signal kills it. Requests that arrive together get
//! one send, straight from the memory of the pages.

use std::error::Error;
use std::io::IoSlice;
use std::net::TcpListener;
use std::{env, thread};

use aquifer_page::PAGE_SIZE;
use aquifer_transport::channel::{Channel, Socket};

const REQUEST: usize = 64;
/// The most requests that one send answers.
const MOST: usize = 64;
/// Number of pages: 64 MiB, more than a small CPU cache holds.
const PAGES: usize = 64 << 8;

fn main() -> Result<(), Box<dyn Error>> {
    let address = env::args().nth(1).ok_or("usage: ping_pong HOST:PORT")?;
    let listener = TcpListener::bind(address)?;
    println!("listening on {}", listener.local_addr()?);
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            // An error means that the peer has gone, as any peer may.
            let _ = serve(&mut stream.into());
        });
    }
    Ok(())
}

fn serve(socket: &mut Socket) -> std::io::Result<()> {
    let pages = vec![0x5a; PAGES * PAGE_SIZE];
    let mut requests = [0; MOST * REQUEST];
    let mut there = 0;
    loop {
        match socket.recv(&mut requests[there..])? {
            0 => return Ok(()),
            received => there += received,
        }
        let whole = there - there % REQUEST;
        let mut answers = [IoSlice::new(&[]); MOST];
        for (answer, request) in answers.iter_mut().zip(requests[..whole].chunks(REQUEST)) {
            let page = usize::from(request[0]) | usize::from(request[1]) << 8;
            *answer = IoSlice::new(&pages[page % PAGES * PAGE_SIZE..][..PAGE_SIZE]);
        }
        socket.send_all(&mut answers[..whole / REQUEST])?;
        requests.copy_within(whole..there, 0);
        there -= whole;
    }
}
