//! The stages of resizes, and the kernel's functions that are them.

/// A stage.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) name: &'static str,
    /// The functions that are it, of which the first that a kernel has is measured: some are inlined, or of other architectures.
    pub(super) functions: &'static [&'static str],
    /// It is around others, and its time contains theirs.
    pub(super) encloses: bool,
}

const fn known(name: &'static str, functions: &'static [&'static str]) -> Known {
    Known { name, functions, encloses: false }
}

/// Those of Bielski et al. 2018, Table I, as far as they are in the guest, in its order; then what virtio-mem adds.
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
    // Of blocks of which a part is plugged.
    known("sub_block_onlining", &["virtio_mem_fake_online"]),
    known(
        "sub_block_offlining",
        &["virtio_mem_fake_offline", "alloc_contig_range_noprof", "alloc_contig_range"],
    ),
    known(REQUESTS, &["virtio_mem_send_request"]),
    Known { name: TOTAL, functions: &["virtio_mem_run_wq"], encloses: true },
];

/// What virtio-mem asks of the host, until the answer is there.
const REQUESTS: &str = "host_requests";

/// Everything that the guest does about a resize, requests included.
const TOTAL: &str = "guest_total";

/// The names of all stages.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|known| known.name)
}

/// What a probe's event is called, at the beginning of a stage and at its end.
pub(super) const IN: &str = "in_";
pub(super) const OUT: &str = "out_";
