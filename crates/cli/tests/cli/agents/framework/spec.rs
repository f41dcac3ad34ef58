//! What a host of a test is to be like.

use aquifer_page::Bytes;
use toml::{Table, Value};

/// A host to be: its name, its memory, and what its configuration says beside the usual.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: &'static str,
    pub memory: Bytes,
    /// Whether its leases are reached over NVMe/TCP too.
    pub nvme: bool,
    settings: Vec<(&'static str, &'static str, Value)>,
}

impl Spec {
    /// A host of 256 MiB that lends when asked and borrows only when the test has it borrow.
    pub fn new(name: &'static str) -> Self {
        let usual = Self { name, memory: Bytes::mib(256), nvme: false, settings: Vec::new() };
        usual
            .set("memory", "period", "100ms")
            .set("memory", "gate_swap", true)
            // A machine that runs tests makes tasks wait for all sorts of reasons.
            .set("memory", "pressure", 0.0)
            // What this host swaps out goes to what it borrowed, whatever other swap the machine has.
            .set("borrow", "priority", 32_767)
            .set("borrow", "enabled", false)
            .set("borrow", "request", "128M")
    }

    /// The same with this much memory.
    pub fn memory(mut self, memory: Bytes) -> Self {
        self.memory = memory;
        self
    }

    /// The same, as a lender whose leases are reached over NVMe/TCP too, and as a borrower that goes that way.
    pub fn over_nvme(mut self) -> Self {
        self.nvme = true;
        self.set("borrow", "protocol", "nvme-tcp")
    }

    /// The same with `key` set in `[section]`.
    pub fn set(
        mut self,
        section: &'static str,
        key: &'static str,
        value: impl Into<Value>,
    ) -> Self {
        self.settings.push((section, key, value.into()));
        self
    }

    /// Puts what was set into a configuration.
    pub fn apply(&self, config: &mut Table) {
        for (section, key, value) in &self.settings {
            let section = config.entry(*section).or_insert_with(|| Table::new().into());
            section.as_table_mut().unwrap().insert((*key).to_owned(), value.clone());
        }
    }
}

impl From<&'static str> for Spec {
    fn from(name: &'static str) -> Self {
        Self::new(name)
    }
}
