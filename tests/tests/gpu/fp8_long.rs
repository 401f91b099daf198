//! Long sequences through every row of e4m3 operands: the figures are in the log.

use hopper_attention::{DType, KernelInfo, MaskClass, Workspace, f16};
use hopper_attention_tests::fp8::half_scores_of;
use hopper_attention_tests::gpu::fp8::OnDevice;
use hopper_attention_tests::gpu::{Gpu, supported};
use hopper_attention_tests::long::{KEYS, Long, SETTINGS, Values};
use hopper_attention_tests::problems::Grid;
use hopper_attention_tests::say;

#[test]
fn long_sequences_are_as_accurate_as_quantisation_allows() {
    let Some(gpu) = Gpu::open("long_sequences_are_as_accurate_as_quantisation_allows") else { return };
    // A window is never long.
    let rows: Vec<_> = gpu.fp8_rows().into_iter().filter(|row| row.mask() != MaskClass::Window).collect();
    assert!(!rows.is_empty(), "no row of e4m3 operands runs here");
    let mut workspace = Workspace::alloc(&gpu.lane(), 1 << 12).unwrap();
    let (mut wrong, mut taken) = (Vec::new(), vec![0; rows.len()]);
    for head_dims in [[64, 64], [128, 128], [192, 128], [256, 256]] {
        for values in [Values::Normal, Values::Positive] {
            // compute-sanitizer sees all there is to see in a short one.
            for &keys in &KEYS[..Grid::from_env().pick(1, KEYS.len())] {
                let long = Long::new(keys, head_dims, values);
                let settings =
                    SETTINGS.into_iter().flat_map(|s| half_scores_of(&rows).into_iter().map(move |p| (s, p)));
                for ((mask, scaling), half) in settings {
                    let quantised = long.quantised(mask, scaling, half);
                    let problem = quantised.operands.problem();
                    let on_device = OnDevice::new(&gpu.stream, &quantised.operands);
                    let fits =
                        |row: &KernelInfo| row.head_dim_qk() == head_dims[0] && (row.scores() == DType::F16) == half;
                    for (row, taken) in rows.iter().zip(&mut taken).filter(|(row, _)| fits(row)) {
                        let plan = supported(problem.plan_with_row(&gpu.device, row), || row.to_string());
                        let Some(plan) = plan else { continue };
                        let written = on_device.run::<f16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
                        let (figures, complaint) = quantised.judge(&written.output(problem).0);
                        say(&format!("{row}: {figures}"));
                        wrong.extend(complaint.map(|complaint| format!("{row}: {complaint}")));
                        *taken += 1;
                    }
                }
            }
        }
    }
    assert!(taken.iter().all(|&taken| taken > 0), "rows that took no case: {taken:?}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
