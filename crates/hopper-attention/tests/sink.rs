//! The made-up operand `sink` is checked like every other one, by its row of the list alone.

use hopper_attention::*;

#[test]
fn a_sink_is_asked_for_and_checked() {
    let dims = Dims::new(1, 2, 3, 8);
    let layout = Layout::contiguous([1, 2, 3, 8]).unwrap();
    let (q, mut o) = (vec![0f32; 48], vec![0f32; 48]);
    let run = |wanted: bool, sink: Option<&[f32]>, o: &mut Vec<f32>| {
        let problem = ForwardProblem::builder(DType::F32, dims).sink(wanted).build()?;
        let plan = problem.plan(&Device::cpu())?;
        let tensor = || TensorRef::host(&q, layout).unwrap();
        let mut args = ForwardArgs::new(tensor(), tensor(), tensor(), TensorMut::host(o, layout).unwrap());
        if let Some(sink) = sink {
            args = args.sink(TensorRef::host(sink, Layout::contiguous([sink.len()]).unwrap()).unwrap());
        }
        plan.run(&Stream::Cpu, &mut Workspace::host(&mut []), args)
    };
    let text = |result: Result<()>| result.unwrap_err().to_string();
    assert_eq!(run(true, Some(&[0.0; 3]), &mut o), Ok(()));
    let missing = text(run(true, None, &mut o));
    assert!(missing.starts_with("sink: missing"), "{missing}");
    let shape = text(run(true, Some(&[0.0; 2]), &mut o));
    assert!(shape.contains("sink") && shape.contains("[3]"), "{shape}");
    let unasked = text(run(false, Some(&[0.0; 3]), &mut o));
    assert!(unasked.starts_with("sink"), "{unasked}");
}
