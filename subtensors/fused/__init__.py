"""`st.fused`: single-tensor maths over whole lists, eagerly and in compiled graphs."""
