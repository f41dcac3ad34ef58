//! The smallest possible engine: `bare_engine FILE SIZE HOST:PORT|unix:PATH`. It creates the file,
//! which then behaves like a region with all pages on that NBD server. One thread fetches a page
//! for each fault and puts it there; no page leaves.
//!
//! Its time is the lower bound of the cost of a fault. `bench/fault_latency.py` compares regions
//! with it.

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_nbd::client::{Connection, Operation, Target};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region_client::{Listener, Reply, Request, Userfault, socket_of};
use aquifer_transport::Address;
use rustix::event::{PollFd, PollFlags, poll};

const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1).collect();
    let [file, size, address] = &args[..] else {
        return Err("usage: bare_engine FILE SIZE HOST:PORT|unix:PATH".into());
    };
    let (size, address): (Bytes, Address) = (size.parse()?, address.parse()?);
    let target = Target { address, export: String::new(), tls: None };
    let mut lender = Connection::connect(Arc::new(target), TIMEOUT)?;
    for page in 0..size.pages() {
        let data = [page as u8 | 1; PAGE_SIZE];
        lender.run(&mut [Operation::Write { offset: page * PAGE_SIZE as u64, from: &data }])?;
    }
    File::create(file)?.set_len(size.0)?;
    let socket = socket_of(Path::new(file)).ok_or("that file cannot be a region")?;
    fs::create_dir_all(socket.parent().ok_or("that file has no directory")?)?;
    let listener = Listener::bind(&socket)?;
    println!("serving");
    let (userfault, start, _program) = loop {
        let program = listener.accept()?;
        let Some((Request::Attach(attach), userfaults)) = program.receive()? else {
            return Err("a program that does not attach".into());
        };
        let userfault = userfaults.into_iter().next().ok_or("a mapping without its userfaultfd")?;
        if attach.watched {
            program.send(&Reply::Done, &[])?;
            break (userfault, attach.address, program);
        }
        // It attaches again, and its faults come here.
        program.send(&Reply::Watch, &[])?;
    };
    // It serves no further request, so every later connect fails.
    drop(listener);
    serve(&userfault.into(), start, &mut lender)
}

fn serve(userfault: &Userfault, start: u64, lender: &mut Connection) -> Result<(), Box<dyn Error>> {
    let mut page = [0; PAGE_SIZE];
    loop {
        poll(&mut [PollFd::new(&userfault.as_fd(), PollFlags::IN)], None)?;
        for fault in userfault.faults()? {
            lender
                .run(&mut [Operation::Read { offset: fault.address - start, into: &mut page }])?;
            userfault.fill(fault.address, &page, false)?;
        }
    }
}
