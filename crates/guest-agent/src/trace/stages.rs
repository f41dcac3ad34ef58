//! The stages of resizes, and the kernel functions that perform them.

/// A stage, and its functions.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) name: &'static str,
    /// Alternative functions; the first that the kernel has is measured. Some are inlined, or
    /// belong to other architectures.
    pub(super) functions: &'static [&'static str],
    /// Whether the stage encloses others, and its time includes theirs.
    pub(super) encloses: bool,
}

const fn known(name: &'static str, functions: &'static [&'static str]) -> Known {
    Known { name, functions, encloses: false }
}

/// The guest's stages in \[Bielski18\], Table I, in its order, followed by those of virtio-mem.
///
/// The table's guest subtotal is [`TOTAL`] less [`REQUESTS`].
pub(super) static KNOWN: [Known; 10] = [
    known("page_table_build", &["init_memory_mapping", "__create_pgd_mapping"]),
    known("section_init", &["__add_pages"]),
    known("onlining", &["online_pages", "memory_block_online", "memory_subsys_online"]),
    known("offlining", &["offline_pages", "memory_block_offline", "memory_subsys_offline"]),
    known("section_clean_up", &["__remove_pages"]),
    known(
        "page_table_destroy",
        &["kernel_physical_mapping_remove", "remove_pagetable", "__remove_pgd_mapping"],
    ),
    // For blocks that are partly plugged.
    known("sub_block_onlining", &["virtio_mem_fake_online"]),
    known(
        "sub_block_offlining",
        &["virtio_mem_fake_offline", "alloc_contig_range_noprof", "alloc_contig_range"],
    ),
    known(REQUESTS, &["virtio_mem_send_request"]),
    Known { name: TOTAL, functions: &["virtio_mem_run_wq"], encloses: true },
];

/// The requests of virtio-mem to the host, until the answer.
const REQUESTS: &str = "host_requests";

/// All of the guest's work for a resize, including the requests.
const TOTAL: &str = "guest_total";

/// Returns the names of all stages.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|known| known.name)
}

/// Prefixes of the events at a stage's entry and return.
pub(super) const IN: &str = "in_";
pub(super) const OUT: &str = "out_";
