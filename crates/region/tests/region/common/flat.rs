//! Machines under KVM for guests that need no kernel: flat 32-bit code, without descriptor tables.

use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Error, Kvm, VcpuFd, VmFd};

/// Makes a machine with this memory: guest-physical address, address here, and bytes of each part.
pub fn machine(kvm: &Kvm, memory: &[(u64, u64, u64)]) -> Result<VmFd, Error> {
    let machine = kvm.create_vm()?;
    for (slot, (at, address, length)) in memory.iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: *at,
            memory_size: *length,
            userspace_addr: *address,
        };
        // SAFETY: the callers keep the memory mapped for longer than the machine lives, and access
        // it as atomics only.
        unsafe { machine.set_user_memory_region(slot) }?;
    }
    Ok(machine)
}

/// Makes a processor with flat 32-bit code and data segments.
pub fn processor(machine: &VmFd, number: u64) -> Result<VcpuFd, Error> {
    let processor = machine.create_vcpu(number)?;
    let mut state = processor.get_sregs()?;
    let flat = |kind| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 8,
        type_: kind,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    state.cs = flat(0xb);
    [&mut state.ds, &mut state.es, &mut state.ss]
        .into_iter()
        .for_each(|segment| *segment = flat(0x3));
    state.cr0 |= 1;
    processor.set_sregs(&state)?;
    Ok(processor)
}
