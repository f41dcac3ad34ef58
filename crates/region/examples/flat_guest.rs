//! A guest under KVM that needs no kernel, for measuring: `flat_guest FILE|SIZE random|sequential
//! WORDS PASSES`.
//!
//! Its memory is a region, or with a SIZE such as `256M` this program's own memory in huge pages,
//! as QEMU has it. It first writes each page once, and then changes words: `random` changes any,
//! `sequential` one after the other. Each pass changes so many words. Prints one line
//! of JSON with the seconds of the first writes and of each pass, and a sum over the memory.

#[path = "../tests/region/common/flat.rs"]
mod flat;

use std::env;
use std::error::Error;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region_client::Region;
use flat::{machine, processor};
use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// The guest-physical addresses of the code and of the memory.
const CODE_AT: u64 = 0x1000;
const MEMORY_AT: u64 = 0x1000_0000;

/// Writes EAX to each page from ESI to before EBX, in steps of EDI.
#[rustfmt::skip]
const FIRST: [u8; 9] = [
    0x89, 0x06,                         // next: mov [esi], eax
    0x01, 0xfe,                         //       add esi, edi
    0x39, 0xde,                         //       cmp esi, ebx
    0x72, 0xf8,                         //       jb next
    0xf4,                               //       hlt
];

/// Changes ECX random words of the memory at ESI, whose size is EDX plus one, a power of two.
#[rustfmt::skip]
const RANDOM: [u8; 28] = [
    0x69, 0xc0, 0x0d, 0x66, 0x19, 0x00, // next: imul eax, eax, 1664525
    0x05, 0x5f, 0xf3, 0x6e, 0x3c,       //       add eax, 1013904223
    0x89, 0xc3,                         //       mov ebx, eax
    0xc1, 0xeb, 0x04,                   //       shr ebx, 4
    0x21, 0xd3,                         //       and ebx, edx
    0x83, 0xe3, 0xfc,                   //       and ebx, -4
    0x31, 0x04, 0x1e,                   //       xor [esi + ebx], eax
    0x49,                               //       dec ecx
    0x75, 0xe5,                         //       jnz next
    0xf4,                               //       hlt
];

/// Changes ECX words of the same memory, one after the other.
#[rustfmt::skip]
const SEQUENTIAL: [u8; 16] = [
    0x31, 0x04, 0x1e,                   // next: xor [esi + ebx], eax
    0x83, 0xc3, 0x04,                   //       add ebx, 4
    0x21, 0xd3,                         //       and ebx, edx
    0x05, 0x01, 0x00, 0x00, 0x00,       //       add eax, 1
    0x49,                               //       dec ecx
    0x75, 0xf0,                         //       jnz next
];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1).collect();
    let [memory, order, words, passes] = &args[..] else {
        return Err("usage: flat_guest FILE|SIZE random|sequential WORDS PASSES".into());
    };
    let region: Region;
    let (address, size) = match memory.parse::<Bytes>() {
        Ok(size) => (own_memory(size)?, size),
        Err(_) => {
            region = Region::map(Path::new(memory))?;
            let bytes = region.bytes();
            (bytes.as_ptr().expose_provenance(), Bytes(bytes.len() as u64))
        }
    };
    if !size.0.is_power_of_two() || size > Bytes::mib(256) {
        return Err("the memory must be a power of two, at most 256M".into());
    }
    let mut code = vec![0_u8; 2 * PAGE_SIZE];
    let start = code.as_ptr().align_offset(PAGE_SIZE);
    let loops = match order.as_str() {
        "random" => RANDOM.to_vec(),
        "sequential" => [&SEQUENTIAL[..], &[0xf4]].concat(),
        other => return Err(format!("unknown order {other}").into()),
    };
    code[start..][..FIRST.len()].copy_from_slice(&FIRST);
    code[start + 64..][..loops.len()].copy_from_slice(&loops);
    let code_here = code[start..].as_ptr().expose_provenance() as u64;
    let slots = [(CODE_AT, code_here, PAGE_SIZE as u64), (MEMORY_AT, address as u64, size.0)];
    let machine = machine(&Kvm::new()?, &slots)?;
    let mut processor = processor(&machine, 0)?;
    let first = kvm_regs {
        rip: CODE_AT,
        rflags: 2,
        rax: 1,
        rsi: MEMORY_AT,
        rdi: PAGE_SIZE as u64,
        rbx: MEMORY_AT + size.0,
        ..kvm_regs::default()
    };
    let first = run(&mut processor, &first)?;
    let count = words.parse::<u64>()?;
    let mut seconds = Vec::new();
    for pass in 0..passes.parse::<u64>()? {
        let registers = kvm_regs {
            rip: CODE_AT + 64,
            rflags: 2,
            rax: pass + 7,
            rsi: MEMORY_AT,
            rcx: count,
            rdx: size.0 - 1,
            ..kvm_regs::default()
        };
        seconds.push(run(&mut processor, &registers)?);
    }
    // SAFETY: the memory is mapped, and the guest has halted.
    let words = unsafe {
        let first = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(address);
        std::slice::from_raw_parts(first, size.0 as usize / 8)
    };
    let sum = words
        .iter()
        .fold(0_u64, |sum, word| sum.wrapping_mul(31).wrapping_add(word.load(Ordering::Relaxed)));
    println!(r#"{{"first":{first},"passes":{seconds:?},"sum":{sum}}}"#);
    Ok(())
}

/// Maps memory in huge pages where the kernel has some, as QEMU does for its guests.
fn own_memory(size: Bytes) -> Result<usize, Box<dyn Error>> {
    let (length, huge) = (size.0 as usize, 2 << 20);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping replaces nothing.
    let mapped = unsafe {
        mmap_anonymous(std::ptr::null_mut(), length + huge, protection, MapFlags::PRIVATE)
    }?;
    let start = mapped.expose_provenance().next_multiple_of(huge);
    // SAFETY: the range is in the new mapping.
    unsafe {
        madvise(std::ptr::with_exposed_provenance_mut(start), length, Advice::LinuxHugepage)
    }?;
    Ok(start)
}

/// Runs the guest until it halts; returns the seconds.
fn run(processor: &mut VcpuFd, registers: &kvm_regs) -> Result<f64, Box<dyn Error>> {
    processor.set_regs(registers)?;
    let began = Instant::now();
    match processor.run()? {
        VcpuExit::Hlt => Ok(began.elapsed().as_secs_f64()),
        exit => Err(format!("the guest ended with {exit:?}").into()),
    }
}
