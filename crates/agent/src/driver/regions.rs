//! Memory for regions: the question of a region's maker, and its word on the region.

use std::path::Path;

use aquifer_api::Problem;
use aquifer_api::message::Permit;
use aquifer_api::order::{BorrowFor, Provided, Settle};
use aquifer_control::node::Input;
use aquifer_control::{LiveVolume, RegionRequest, VolumeStatus};
use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_region::process::client::By;
use aquifer_region::process::{Files, RegionSpec, client};
use aquifer_vm::process::client as vms;
use tokio::sync::oneshot::Sender;

use super::Driver;
use super::reply::Reply;

impl Driver {
    /// Passes a request on, if this agent looks at the directory of the region.
    pub(super) fn borrow_for(
        &mut self,
        order: BorrowFor,
        reply: Sender<Result<Provided, Problem>>,
    ) {
        let BorrowFor { region, volume, bytes, group, directory } = order;
        if !is_same(&directory, self.parts.borrower.regions_directory()) {
            let here = directory.display();
            let error = format!("this host's agent does not look at regions in {here}");
            let help = self.parts.config.state.display();
            let help = Some(format!("make the region with --run-dir {help}"));
            return drop(reply.send(Err(Problem { error, help })));
        }
        let ticket = self.replies.keep(Reply::Provided(reply));
        // A maker needs all of it.
        let request = RegionRequest { region, volume, bytes, least: bytes, group };
        self.input(Input::BorrowFor { request, ticket });
    }

    /// Describes the leases to the region's maker on a blocking thread: a lender may be asked.
    pub(super) fn provide(&self, live: LiveVolume, reply: Sender<Result<Provided, Problem>>) {
        let borrower = self.parts.borrower.clone();
        tokio::task::spawn_blocking(move || {
            let provided = borrower.provide(&live);
            let is_bad = provided.is_err();
            if reply.send(provided).is_err() || is_bad {
                borrower.refuse(&live);
            }
        });
    }

    /// Sets the size of a region's cache on a blocking thread: pages may have to leave.
    pub(super) fn set_cache(&self, region: RegionName, cache: Bytes) {
        let run_dir = self.parts.config.state.clone();
        self.later(move || {
            let set = match vms::of_region(&run_dir, &region) {
                Some(vm) => {
                    vms::resize_cache(&vm, cache, By::Agent).map_err(|error| error.to_string())
                }
                None => client::resize_cache(
                    &Files::new(&run_dir.join("regions"), &region),
                    cache,
                    By::Agent,
                )
                .map_err(|error| error.to_string()),
            };
            Input::CacheSet { region, failed: set.err() }
        });
    }

    /// Lets another host use a lease of this one, unless the lease cannot change hands.
    pub(super) fn permit(
        &mut self,
        from: HostName,
        Permit { lease, generation, to }: Permit,
        reply: Sender<Result<(), Problem>>,
    ) {
        if !self.parts.lender.can_move() {
            let host = &self.parts.config.host;
            let error = format!("the kernel of {host} serves lease {lease} to {from} alone");
            let help = Some(format!("set [lend] backend = \"store\" on {host}"));
            return drop(reply.send(Err(Problem { error, help })));
        }
        let ticket = self.replies.keep(Reply::Done(reply));
        self.input(Input::Permit { from, lease, generation, to, ticket });
    }

    /// Expects a region of another host. A blocking thread asks its lenders how to reach them.
    pub(super) fn expect(
        &mut self,
        memory: RegionSpec,
        reply: Sender<Result<RegionSpec, Problem>>,
    ) {
        if self.node.has_left() {
            let error = "this host leaves its cluster".to_owned();
            _ = reply.send(Err(Problem { error, help: None }));
            return;
        }
        let (volume, leases) = self.parts.borrower.expect_region(&memory);
        if !leases.is_empty() {
            self.input(Input::Expect { volume, leases });
        }
        let borrower = self.parts.borrower.clone();
        tokio::task::spawn_blocking(move || {
            let here = borrower.for_this_host(memory);
            // The requester may be gone; the failed send does not matter then.
            _ = reply.send(here.map_err(|error| Problem { error, help: None }));
        });
    }

    /// Takes the word of a region's maker.
    pub(super) fn settle(&self, order: Settle) -> Result<(), Problem> {
        let Settle { volume, exists } = order;
        let known = self.node.controller().volumes().into_iter();
        let known = known.filter(|known| !known.owner.is_swap());
        let known: Option<VolumeStatus> = known.into_iter().find(|known| known.volume == volume);
        let held = match &known {
            Some(known) => self.parts.borrower.settle(known, exists),
            None => Ok(false),
        };
        let lost = "the agent gave the leases back meanwhile".to_owned();
        match held {
            Ok(held) if held || !exists => Ok(()),
            Ok(_) => Err(Problem { error: lost, help: Some("make the region again".to_owned()) }),
            Err(error) => Err(Problem { error, help: None }),
        }
    }
}

/// Returns whether two directories of regions are one. They need not exist: they come and go with
/// regions, inside directories that stay.
fn is_same(one: &Path, other: &Path) -> bool {
    let parent = |path: &Path| path.parent()?.canonicalize().ok();
    let parents = (parent(one), parent(other));
    one == other
        || (one.file_name() == other.file_name() && parents.0.is_some() && parents.0 == parents.1)
}
