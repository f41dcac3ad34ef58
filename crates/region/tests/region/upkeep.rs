//! The engine reconnects to lenders even while no program touches the region.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;
use aquifer_region::{PolicyKind, Scheme};
use aquifer_volume::Happening;

use crate::common::Setting;
use crate::common::pool::wait_until;

#[test]
fn a_lender_that_is_back_is_noticed_while_nothing_is_touched() {
    let mut setting = Setting::new(256);
    let serving = setting.serve(128, PolicyKind::Fifo, Scheme::default());
    let region = setting.map();
    (0..64).for_each(|page| region.words()[page * PAGE_SIZE / 8].store(1, Ordering::Relaxed));
    let happened = |is_it: fn(&Happening) -> bool| {
        serving.engine.volume().events_after(0).iter().any(|event| is_it(&event.what))
    };
    Arc::get_mut(&mut setting.lender).unwrap().kill();
    serving.engine.persist().unwrap_err();
    assert!(happened(|what| matches!(what, Happening::LenderLost { .. })));
    Arc::get_mut(&mut setting.lender).unwrap().restart();
    wait_until("the lender is seen to be back", || {
        happened(|what| matches!(what, Happening::LenderBack { .. }))
    });
    serving.engine.persist().unwrap();
}
