//! A guest under KVM with a region as its memory.
//!
//! The kernel raises faults on behalf of two virtual processors at once, while pages leave. The
//! guest needs no kernel, only forty bytes of code. The test is skipped if `/dev/kvm` cannot be
//! opened.

use std::sync::atomic::Ordering;
use std::thread;

use aquifer_page::PAGE_SIZE;
use aquifer_region::{PolicyKind, Scheme};
use aquifer_region_client::Region;
use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

use crate::common::flat::{machine, processor};
use crate::common::{PAGE, Setting};

const PAGES: u64 = 4096;
const PROCESSORS: u64 = 2;
const ROUNDS: u32 = 6;

/// The guest-physical addresses of the code and of the region.
const CODE_AT: u64 = 0x1000;
const REGION_AT: u64 = 0x1000_0000;

/// The guest's code. It visits pages from ESI in steps of EDI, to before EBX. The first and the
/// last four bytes of each page must be its address XOR ECX. They become its address XOR EDX. It
/// halts at the end, and writes to port 0x10 on a mismatch.
#[rustfmt::skip]
const CODE: [u8; 40] = [
    0x8b, 0x06,                         // next: mov eax, [esi]
    0x89, 0xf5,                         //       mov ebp, esi
    0x31, 0xcd,                         //       xor ebp, ecx
    0x39, 0xe8,                         //       cmp eax, ebp
    0x75, 0x1b,                         //       jne wrong
    0x39, 0x86, 0xfc, 0x0f, 0x00, 0x00, //       cmp [esi + 4092], eax
    0x75, 0x13,                         //       jne wrong
    0x89, 0xf0,                         //       mov eax, esi
    0x31, 0xd0,                         //       xor eax, edx
    0x89, 0x06,                         //       mov [esi], eax
    0x89, 0x86, 0xfc, 0x0f, 0x00, 0x00, //       mov [esi + 4092], eax
    0x01, 0xfe,                         //       add esi, edi
    0x39, 0xde,                         //       cmp esi, ebx
    0x72, 0xdc,                         //       jb next
    0xf4,                               //       hlt
    0xe6, 0x10,                         // wrong: out 0x10, al
    0xf4,                               //       hlt
];

/// Returns the XOR key of a round.
fn key(round: u32) -> u32 {
    (round + 1).wrapping_mul(0x9e37_79b9)
}

fn content(page: u64, round: u32) -> u64 {
    u64::from((REGION_AT + page * PAGE) as u32 ^ key(round))
}

/// Returns the first and the last four bytes of a page, the only ones that the guest uses.
fn ends(region: &Region, page: u64) -> [u64; 2] {
    let words = &region.words()[(page * PAGE) as usize / 8..][..PAGE_SIZE / 8];
    [words[0].load(Ordering::Relaxed), words[words.len() - 1].load(Ordering::Relaxed) >> 32]
}

/// Makes a processor check and change its pages, round after round.
fn work(processor: &mut VcpuFd, number: u64) {
    for round in 0..ROUNDS {
        let registers = kvm_regs {
            rip: CODE_AT,
            rflags: 2,
            rsi: REGION_AT + number * PAGE,
            rdi: PROCESSORS * PAGE,
            rbx: REGION_AT + PAGES * PAGE,
            rcx: key(round).into(),
            rdx: key(round + 1).into(),
            ..kvm_regs::default()
        };
        processor.set_regs(&registers).unwrap();
        match processor.run().unwrap() {
            VcpuExit::Hlt => {}
            exit => {
                let exit = format!("{exit:?}");
                let at = processor.get_regs().unwrap().rsi;
                panic!("processor {number}, round {round}, address {at:#x}: {exit}");
            }
        }
    }
}

#[test]
fn two_vcpus_use_a_region_four_times_its_cache() {
    let Ok(kvm) = Kvm::new() else {
        eprintln!("skipped: /dev/kvm cannot be opened");
        return;
    };
    let setting = Setting::new(PAGES);
    let serving = setting.serve(PAGES / 4, PolicyKind::Clock, Scheme::PreEvict);
    let region = setting.map();
    for page in 0..PAGES {
        let words = &region.words()[(page * PAGE) as usize / 8..][..PAGE_SIZE / 8];
        words[0].store(content(page, 0), Ordering::Relaxed);
        words[words.len() - 1].store(content(page, 0) << 32, Ordering::Relaxed);
    }
    let mut code = vec![0_u8; 2 * PAGE_SIZE];
    let start = code.as_ptr().align_offset(PAGE_SIZE);
    code[start..][..CODE.len()].copy_from_slice(&CODE);
    let addresses =
        [code[start..].as_ptr().expose_provenance(), region.bytes().as_ptr().expose_provenance()];
    let [code_here, region_here] = addresses.map(|address| address as u64);
    let machine =
        machine(&kvm, &[(CODE_AT, code_here, PAGE), (REGION_AT, region_here, PAGES * PAGE)])
            .unwrap();
    let mut processors: Vec<_> =
        (0..PROCESSORS).map(|number| processor(&machine, number).unwrap()).collect();
    thread::scope(|scope| {
        for (processor, number) in processors.iter_mut().zip(0..) {
            scope.spawn(move || work(processor, number));
        }
    });
    let counts = serving.engine.counts();
    assert!(counts.evicted > PAGES * 3, "{counts:?}");
    for page in 0..PAGES {
        assert_eq!(ends(&region, page), [content(page, ROUNDS); 2], "page {page}");
    }
}
