//! stub
use crate::config::Config;
use aquifer_api::{Problem, order::Borrowed, status};
use aquifer_control::{BorrowedLease, LiveVolume};
use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};
use std::collections::BTreeMap;
use std::path::PathBuf;
#[derive(Debug)]
pub struct Borrower;
impl Borrower {
    pub fn open(_: &Config, _: PathBuf) -> Result<Self, String> {
        Ok(Self)
    }
    pub fn restored(&self) -> Vec<LiveVolume> {
        vec![]
    }
    pub fn activate(&self, _: &LiveVolume) -> Result<(), String> {
        Ok(())
    }
    pub fn deactivate(&self, _: VolumeId) -> Result<(), String> {
        Ok(())
    }
    pub fn evacuate(
        &self,
        _: VolumeId,
        _: LeaseId,
        _: &[BorrowedLease],
    ) -> (Vec<LeaseId>, Result<(), String>) {
        (vec![], Ok(()))
    }
    pub fn status(&self) -> Vec<status::Volume> {
        vec![]
    }
    pub fn borrowed(&self, _: VolumeId) -> Result<Borrowed, Problem> {
        Err(Problem { error: String::new(), help: None })
    }
    pub fn is_active(&self) -> bool {
        false
    }
    pub fn swap_used(&self) -> Bytes {
        Bytes::ZERO
    }
    pub fn leases_by_lender(&self) -> BTreeMap<HostName, Vec<LeaseId>> {
        BTreeMap::new()
    }
}
