//! The specification of a test's host.

use aquifer_page::Bytes;
use toml::{Table, Value};

/// The name, memory and special settings of a host.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: &'static str,
    pub memory: Bytes,
    /// Whether it also serves its leases over NVMe/TCP.
    pub nvme: bool,
    settings: Vec<(&'static str, &'static str, Value)>,
}

impl Spec {
    /// Describes a host of 256 MiB that lends when asked, and borrows only when the test orders it.
    pub fn new(name: &'static str) -> Self {
        let usual = Self { name, memory: Bytes::mib(256), nvme: false, settings: Vec::new() };
        usual
            .set("memory", "period", "100ms")
            .set("memory", "gate_swap", true)
            // Tasks on a machine that runs tests wait for memory for many reasons.
            .set("memory", "pressure", 0.0)
            // Above all other swap of the machine, so that this host swaps to borrowed memory only.
            .set("borrow", "priority", 32_767)
            .set("borrow", "enabled", false)
            .set("borrow", "request", "128M")
            // Most tests count what each lender lends.
            .set("borrow", "protection", "none")
    }

    /// Sets the host's memory.
    pub fn memory(mut self, memory: Bytes) -> Self {
        self.memory = memory;
        self
    }

    /// Makes the host serve its leases over NVMe/TCP, too, and reach others' leases that way.
    pub fn over_nvme(mut self) -> Self {
        self.nvme = true;
        self.set("borrow", "protocol", "nvme-tcp")
    }

    /// Sets `key` in `[section]`.
    pub fn set(
        mut self,
        section: &'static str,
        key: &'static str,
        value: impl Into<Value>,
    ) -> Self {
        self.settings.push((section, key, value.into()));
        self
    }

    /// Leaves `key` in `[section]` to its default.
    pub fn unset(mut self, section: &str, key: &str) -> Self {
        self.settings.retain(|(of, name, _)| (*of, *name) != (section, key));
        self
    }

    /// Puts the settings into a configuration.
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
